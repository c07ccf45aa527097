// The server's answers. All addresses are relative, so the page also works behind a path prefix.

import { cutOff, Failure, fromAnswer, fromEvent, notCedar, unreachable } from "./failure.js";
import { events } from "./sse.js";

const KEY = "cedar.key";

export class Api {
  #key = read();

  get hasKey() {
    return this.#key !== "";
  }

  /** Kept until the tab closes; an empty one forgets it. */
  set key(value) {
    this.#key = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch {
      // Without storage the key lives as long as the page.
    }
  }

  /** What the server serves. */
  async state() {
    return (await this.#ask("page/state")).json();
  }

  /** Sanitised HTML of a Markdown text. */
  async markdown(text) {
    const answer = await this.#ask("page/markdown", { json: { text } });
    return (await answer.json()).html;
  }

  /** The chunks of one reply. Throws a Failure, or an AbortError once the signal says so. */
  async *chat(body, signal) {
    const headers = { Accept: "text/event-stream", "X-Cedar-Watch": "1" };
    const answer = await this.#ask("v1/chat/completions", { json: body, headers, signal });
    const kind = answer.headers.get("content-type") ?? "";
    if (!kind.startsWith("text/event-stream")) throw notCedar(kind);
    try {
      for await (const { data } of events(answer.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw fromEvent(chunk.error);
        yield chunk;
      }
    } catch (error) {
      if (error instanceof Failure || error.name === "AbortError") throw error;
      throw cutOff();
    }
    throw cutOff();
  }

  async #ask(path, { json, headers = {}, signal } = {}) {
    const sent = { ...headers };
    if (this.#key) sent.Authorization = `Bearer ${this.#key}`;
    if (json !== undefined) sent["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(new URL(path, document.baseURI), {
        method: json === undefined ? "GET" : "POST",
        headers: sent,
        body: json === undefined ? undefined : JSON.stringify(json),
        signal,
        credentials: "same-origin",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw unreachable();
    }
    if (answer.ok) return answer;
    throw fromAnswer(answer.status, answer.headers, await answer.json().catch(() => null));
  }
}

function read() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}
