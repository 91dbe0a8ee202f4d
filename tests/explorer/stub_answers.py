"""Answers of a worker that is tested: as slow, as deadly or as talkative as the question says."""

import os
import signal
import socket
import time


def answer(question, tell):
    kind, value = question
    if kind == "wait":
        while not os.path.exists(value):
            time.sleep(0.01)
    elif kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "connect":
        try:
            socket.create_connection(("127.0.0.1", value))
        except OSError as error:
            yield str(error)
    elif kind == "pid":
        yield os.getpid()
    yield value
