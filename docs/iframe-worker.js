// Browsers start no worker from a file. In a folder, the search's worker therefore runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise((done) => {
        frame.onload = () => {
          const script = frame.contentDocument.createElement("script");
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          script.onload = () => done(frame.contentWindow);
          script.src = url;
          frame.contentDocument.body.append(script);
        };
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then((window) => window.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
