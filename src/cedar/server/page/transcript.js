// The messages of a chat on the page.

import { ReplyView } from "./reply_view.js";
import { UserView } from "./user_view.js";

const NEAR_END = 80;

export class Transcript {
  #root;
  #scroller;
  #toEnd;
  #actions;
  #markdown;
  #views = new Map();
  #following = true;
  #top = 0;
  #height = 0;

  constructor({ root, scroller, toEnd, actions, markdown }) {
    this.#root = root;
    this.#scroller = scroller;
    this.#toEnd = toEnd;
    this.#actions = actions;
    this.#markdown = markdown;
    scroller.addEventListener("scroll", () => this.#look(), { passive: true });
    toEnd.addEventListener("click", () => this.follow());
    // Pictures, rendered blocks and the growing message field move the end without a scroll.
    const moved = new ResizeObserver(() => (this.#following ? this.#jump() : this.#look()));
    moved.observe(root);
    moved.observe(scroller);
  }

  /** Show all messages of a chat anew. */
  show(messages) {
    this.#views.clear();
    this.#root.replaceChildren();
    this.extend(messages);
    // The newest first: they are what is seen.
    for (const message of [...messages].reverse()) this.update(message, messages, false);
    this.follow();
  }

  /** Add views for messages that have none, and drop those of messages that are gone. */
  extend(messages) {
    for (const [message, view] of this.#views) {
      if (messages.includes(message)) continue;
      view.node.remove();
      this.#views.delete(message);
    }
    for (const message of messages) {
      if (this.#views.has(message) || message.role === "tool") continue;
      const view =
        message.role === "user"
          ? new UserView(message, this.#actions)
          : new ReplyView(message, this.#actions, this.#markdown);
      this.#views.set(message, view);
      this.#root.append(view.node);
    }
  }

  /** Show one reply as it is now. */
  update(message, messages, streaming) {
    const view = this.#views.get(message);
    if (!(view instanceof ReplyView)) return;
    view.update(streaming, resultsAfter(message, messages));
  }

  fail(message, failure, retry) {
    this.#views.get(message)?.fail(failure, retry);
  }

  set busy(busy) {
    for (const view of this.#views.values()) view.busy = busy;
  }

  /** Go to the end and stay there while the reply grows. */
  follow() {
    this.#following = true;
    this.#jump();
  }

  #jump() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#remember();
    this.#toEnd.hidden = true;
  }

  #look() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    // Growing text moves the end away, and shrinking text moves the view up: only a move up
    // within the same text, or one to the end, was made by the person.
    const movedUp = scrollTop < this.#top - 1 && scrollHeight >= this.#height;
    if (atEnd) this.#following = true;
    else if (movedUp) this.#following = false;
    this.#remember();
    this.#toEnd.hidden = this.#following;
  }

  #remember() {
    this.#top = this.#scroller.scrollTop;
    this.#height = this.#scroller.scrollHeight;
  }
}

/** Results of a reply's calls: tool messages up to the next other message. */
function resultsAfter(message, messages) {
  const results = new Map();
  for (const next of messages.slice(messages.indexOf(message) + 1)) {
    if (next.role !== "tool") break;
    results.set(next.call, next.text);
  }
  return results;
}
