// Server-sent events out of a stream that may be cut anywhere.

/** Takes text as it arrives and gives the events that it completes, as {event, data}. */
export class EventParser {
  #rest = "";
  #event = "";
  #data = [];

  push(text) {
    this.#rest += text;
    const done = [];
    for (;;) {
      const end = this.#rest.search(/[\r\n]/);
      // A carriage return at the very end may be the first half of a line end.
      if (end < 0 || (this.#rest[end] === "\r" && end === this.#rest.length - 1)) return done;
      const line = this.#rest.slice(0, end);
      this.#rest = this.#rest.slice(end + (this.#rest.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (this.#data.length) done.push({ event: this.#event, data: this.#data.join("\n") });
        this.#event = "";
        this.#data = [];
      } else {
        this.#field(line);
      }
    }
  }

  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
  }
}

/** The events of a response body; the body is cancelled when the reader stops early. */
export async function* events(body) {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      yield* parser.push(done ? decoder.decode() : decoder.decode(value, { stream: true }));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
