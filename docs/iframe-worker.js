// Browsers refuse workers on pages that are opened from a disk. There, the search runs in a hidden frame instead. The
// plugin `offline` would fetch a script for this from a network, unless one is named that has this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.scope = new Promise((resolve) => {
        frame.onload = () => {
          const scope = frame.contentWindow
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = scope.document.createElement("script")
          script.src = url
          script.onload = () => resolve(scope)
          scope.document.head.append(script)
        }
      })
      document.documentElement.append(frame)
    }

    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })))
    }
  }
}
