// Lets the search run when the site is opened as files: browsers start no worker from file://, so its script runs in a
// hidden frame instead. Over HTTP this file does nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const source = new URL(url, document.baseURI).href.replaceAll("&", "&amp;").replaceAll('"', "&quot;");
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.srcdoc =
        `<script>self.postMessage = (data) => frameElement.answer(data)</script><script src="${source}"></script>`;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
    }

    postMessage(data) {
      const message = () => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded.then(message);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
