"""Questions in the layouts that are read, and a tokenizer that knows their words."""

from tightfit.training.data.tokenizer import TextTokenizer, train_tokenizer

TEXT = "the sky is blue and grass is green, while a cat sat on the mat and ate yellow cheese with the dog. " * 3
ASKED = [
    {
        "question": f"The sky is {'very ' * (number % 9)}",
        "choices": ["blue", "a kind of cheese", "on"],
        "answer": number % 3,
    }
    for number in range(12)
]
MMLU = '"What is 2, 3 and 1?",six,"5, or 4",four,seven,A\nIs grass green?,no,yes,maybe,never,B\n'
CEVAL = "id,question,A,B,C,D,answer\n0,下列哪一项是质数？,4,6,7,9,C\n1,Which is a colour?,cat,blue,dog,mat,B\n"


def tokenizer() -> TextTokenizer:
    return train_tokenizer([TEXT], 300)
