// A browser starts no worker from a file. Search then runs in a hidden frame, which answers as a worker does.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === this.inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      this.inside.document.open();
      this.inside.document.write(
        "<script>postMessage = (data) => parent.postMessage(data, '*');" +
          "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = done;" +
          "document.body.appendChild(script); })), Promise.resolve());</" + "script>" +
          `<script src="${url}"></` + "script>",
      );
      this.inside.document.close();
      this.ready = new Promise((done) => { this.inside.onload = done; });
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() { this.inside.frameElement.remove(); }
  };
}
