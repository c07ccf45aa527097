// One open chat: sending, streaming, stopping, and everything that changes its messages.

import { applyChunk, newChat, newReply, openCalls, requestBody } from "./conversation.js";
import { Failure } from "./failure.js";
import { announce, toast } from "./notices.js";

export class Session {
  chat;
  state = null;
  #api;
  #store;
  #transcript;
  #panel;
  #hooks;
  #running = null;
  #fullTold = false;

  /** hooks: {key(problem) -> Promise<key|null>, busy(on), changed()}. */
  constructor({ api, store, transcript, panel, settings, hooks }) {
    this.#api = api;
    this.#store = store;
    this.#transcript = transcript;
    this.#panel = panel;
    this.#hooks = hooks;
    this.chat = newChat(settings);
  }

  get busy() {
    return this.#running !== null;
  }

  /** Learn what the server serves; asks for a key if it must. Throws a Failure. */
  async connect() {
    this.state = await this.#withKey(() => this.#api.state());
    this.#panel.state = this.state;
    return this.state;
  }

  /** Show a chat; a reply that is being written is stopped first. */
  open(chat) {
    this.stop();
    this.#running = null;
    this.chat = chat;
    this.#store.current = chat.id;
    for (const message of chat.messages) {
      // The page was left while this reply was being written.
      if (message.role === "assistant") message.finish ??= "stopped";
    }
    this.#transcript.show(chat.messages);
    this.#panel.restart();
    this.showFigures();
    this.#hooks.changed();
  }

  /** Show the figures of the newest reply that has any. */
  showFigures() {
    const last = this.chat.messages.findLast((message) => message.figures);
    this.#panel.show(last?.figures ?? null, last?.usage);
  }

  configure(change) {
    Object.assign(this.chat.settings, change);
    this.#store.settings = this.chat.settings;
    if (this.chat.messages.length) this.#save(this.chat);
  }

  send(text, images) {
    if (this.busy) return;
    for (const call of openCalls(this.chat)) this.#addResult(call, "No result.");
    this.chat.messages.push({ role: "user", text, images });
    this.#reply();
  }

  /** Replace a message of the person and all that follows, and send it. */
  edit(message, text) {
    if (this.busy) return;
    const { messages } = this.chat;
    const place = messages.indexOf(message);
    messages.splice(place, Infinity, { ...message, text });
    this.#reply();
  }

  /** Write a reply again; what follows it goes. */
  again(message) {
    if (this.busy) return;
    const place = this.chat.messages.indexOf(message);
    if (place < 0) return;
    this.chat.messages.splice(place);
    this.#reply();
  }

  /** Send the results of a reply's calls, in the order of the calls. */
  answer(message, results) {
    if (this.busy) return;
    const open = new Set(openCalls(this.chat));
    message.calls.forEach((call, place) => {
      if (open.has(call)) this.#addResult(call, results[place]);
    });
    this.#transcript.update(message, this.chat.messages, false);
    this.#reply();
  }

  stop() {
    this.#running?.abort();
  }

  /** Keep the chat as it is now, as the page may be left. */
  keep() {
    if (this.chat.messages.length) this.#save(this.chat);
  }

  #addResult(call, text) {
    this.chat.messages.push({ role: "tool", call: call.id, name: call.name, text });
  }

  async #reply() {
    const { chat } = this;
    const reply = newReply();
    const running = new AbortController();
    this.#running = running;
    chat.messages.push(reply);
    chat.changed = Date.now();
    this.#transcript.extend(chat.messages);
    this.#transcript.busy = true;
    this.#hooks.busy(true);
    this.#transcript.update(reply, chat.messages, true);
    this.#transcript.follow();
    this.#panel.restart();
    this.#store.current = chat.id;
    this.#save(chat);
    let failure = null;
    try {
      await this.#withKey(() => this.#stream(chat, reply, running.signal));
      reply.finish ??= "stop";
    } catch (error) {
      if (running.signal.aborted) reply.finish = "stopped";
      else {
        reply.finish = "failed";
        failure = inWords(error);
      }
    }
    if (this.#running === running) this.#running = null;
    chat.changed = Date.now();
    // A chat that was deleted meanwhile stays deleted.
    if (this.chat === chat || this.#store.chat(chat.id)) this.#save(chat);
    if (this.chat === chat) this.#finish(chat, reply, failure);
  }

  #finish(chat, reply, failure) {
    this.#transcript.update(reply, chat.messages, false);
    this.#transcript.busy = false;
    this.#hooks.busy(false);
    this.showFigures();
    if (failure) this.#transcript.fail(reply, failure, () => this.again(reply));
    else announce(spoken(reply));
  }

  async #stream(chat, reply, signal) {
    const body = requestBody(
      { ...chat, messages: chat.messages.filter((message) => message !== reply) },
      this.state ?? (await this.connect()),
    );
    const show = onceAFrame(() => {
      if (this.chat !== chat || this.#running?.signal !== signal) return;
      this.#transcript.update(reply, chat.messages, true);
      this.#panel.show(reply.figures, reply.usage);
    });
    let reasoningSince = 0;
    for await (const chunk of this.#api.chat(body, signal)) {
      applyChunk(reply, chunk);
      if (reply.reasoning && !reasoningSince) reasoningSince = performance.now();
      if (reasoningSince && !reply.reasoningSeconds && (reply.text || reply.calls.length)) {
        reply.reasoningSeconds = (performance.now() - reasoningSince) / 1000;
      }
      show();
    }
  }

  /** Do something that may need a key; ask for one as long as the server refuses. */
  async #withKey(act) {
    for (;;) {
      try {
        return await act();
      } catch (error) {
        if (!(error instanceof Failure) || error.status !== 401) throw error;
        const key = await this.#hooks.key(
          this.#api.hasKey ? "The server did not accept that key." : "",
        );
        if (key === null) throw error;
        this.#api.key = key;
      }
    }
  }

  #save(chat) {
    if (!this.#store.save(chat) && !this.#fullTold) {
      this.#fullTold = true;
      toast("This chat is too large to be kept whole in this browser. Export it to keep it.");
    }
    this.#hooks.changed();
  }
}

function inWords(error) {
  if (error instanceof Failure) return error;
  return new Failure({
    title: "The page could not go on.",
    detail: String(error?.message ?? error),
  });
}

/** A finished reply for screen readers. */
function spoken(reply) {
  if (reply.finish === "stopped") return "Stopped";
  const calls = reply.calls.map((call) => `Tool call ${call.name}.`);
  return ["Reply:", reply.text.slice(0, 2000), ...calls].join(" ");
}

/** Calls act at most once a frame; a page that is not seen has slow frames of its own. */
function onceAFrame(act) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    const run = () => {
      waiting = false;
      act();
    };
    if (document.hidden) setTimeout(run, 500);
    else requestAnimationFrame(run);
  };
}
