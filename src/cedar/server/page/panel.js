// The live figures: what the architecture does for the reply that is being written.

import { byId, element } from "./dom.js";
import { bytes, count, counted, percent, short } from "./format.js";
import { described, Strip } from "./strip.js";

const SPEEDS = 120;

/** Drafts by place in the block: [{drafted, accepted}], one entry if only totals are told. */
export function draftPlaces(drafted, accepted) {
  const tried = [drafted ?? []].flat();
  const right = [accepted ?? []].flat();
  return tried
    .map((number, place) => ({ drafted: number, accepted: right[place] ?? 0 }))
    .filter((place) => place.drafted > 0);
}

/** How two sizes compare: "1/96 of", or "2.1 times" where the first is larger. */
export function ratio(here, full) {
  if (!here || !full) return "";
  return full >= here
    ? `1/${short(full / here >= 10 ? Math.round(full / here) : full / here)} of`
    : `${short(here / full)} times`;
}

export class Panel {
  #state = null;
  #speeds = [];
  #strip;
  #shownPlaces = [];

  constructor() {
    const swatch = (name) => document.querySelector(`.swatch.${name}`);
    this.#strip = new Strip(byId("f-strip"), {
      selected: swatch("selected"),
      window: swatch("window"),
      cached: swatch("cached"),
    });
  }

  set state(state) {
    this.#state = state;
    byId("f-window-key").hidden = !state.window_tokens;
  }

  redraw() {
    this.#strip.draw();
  }

  /** A reply begins, or another chat is shown. */
  restart() {
    this.#speeds = [];
    this.#strip.restart();
  }

  /** Show the figures of a reply; null for a chat without any. usage: of the finished reply. */
  show(figures, usage = null) {
    const known = figures ?? {};
    this.#context(known);
    this.#cache(known);
    this.#selection(known);
    this.#prefix(known, usage);
    this.#speed(known);
    this.#drafts(known);
    this.#line(known);
  }

  #context({ context_tokens: tokens = 0 }) {
    const pool = this.#state?.pool_tokens;
    text("f-context", count(tokens));
    bar("f-context-bar", pool ? tokens / pool : 0);
    text("f-context-note", pool ? `of ${count(pool)} that fit into the pool` : "");
  }

  #cache({ cache_bytes: held, full_cache_bytes: full }) {
    const { full_cache_heads: heads, ...each } = this.#state ?? {};
    const known = held > 0 && full > 0;
    // Before the first reply: what one token takes.
    const here = known ? held : (each.cache_bytes_per_token ?? 0);
    const rival = known ? full : (each.full_cache_bytes_per_token ?? 0);
    const larger = Math.max(here, rival) || 1;
    text("f-cache", here ? bytes(here) : "–");
    text("f-ratio", known ? `${ratio(here, rival)} full size` : "a token");
    text("f-full-name", heads ? `${heads}-head bf16` : "bf16");
    bar("f-cache-bar", here / larger);
    bar("f-full-bar", rival / larger);
    const rivalName = heads
      ? `bf16 keys and values of ${counted(heads, "head")} in every layer`
      : "a full bf16 cache";
    text("f-cache-note", rival ? `${bytes(rival)} as ${rivalName}` : "");
  }

  #selection({ selected, context_tokens: tokens = 0, cached_tokens: cached = 0 }) {
    const window = this.#state?.window_tokens ?? 0;
    const words = selected ? described(selected, tokens, window) : "Nothing was generated yet.";
    text("f-strip-note", words);
    text("f-strip-end", tokens ? count(tokens) : "");
    byId("f-strip").setAttribute("aria-label", words);
    if (selected && tokens) this.#strip.push({ ranges: selected, context: tokens, window, cached });
  }

  #prefix({ cached_tokens: cached, prompt_tokens: told }, usage) {
    const prompt = usage?.prompt_tokens ?? told;
    const known = typeof cached === "number";
    text("f-hit", known ? count(cached) : "–");
    bar("f-hit-bar", known && prompt ? cached / prompt : 0);
    text("f-hit-share", known && prompt ? percent(cached / prompt) : "");
    text("f-hit-note", known && prompt ? `of ${counted(prompt, "prompt token")}` : "");
  }

  #speed({ tokens_per_second: speed }) {
    text("f-speed", speed ? short(speed) : "–");
    if (speed) this.#speeds = [...this.#speeds, speed].slice(-SPEEDS);
    const most = Math.max(...this.#speeds, 1e-9);
    const step = 300 / Math.max(this.#speeds.length - 1, 1);
    const points = this.#speeds.map(
      (each, place) => `${(place * step).toFixed(1)},${(34 - (each / most) * 30).toFixed(1)}`,
    );
    byId("f-speed-line").firstElementChild.setAttribute(
      "points",
      points.length > 1 ? points.join(" ") : "",
    );
  }

  #drafts({ drafted, accepted }) {
    const places = draftPlaces(drafted, accepted);
    const tried = places.reduce((sum, place) => sum + place.drafted, 0);
    const right = places.reduce((sum, place) => sum + place.accepted, 0);
    text("f-drafts", tried ? `${count(right)} of ${count(tried)}` : "–");
    const rows = Array.isArray(drafted) ? places : [];
    if (JSON.stringify(rows) === JSON.stringify(this.#shownPlaces)) return;
    this.#shownPlaces = rows;
    byId("f-places").replaceChildren(...rows.map(placeRow));
  }

  #line({ context_tokens: tokens, cache_bytes: held, tokens_per_second: speed }) {
    const parts = [
      tokens ? counted(tokens, "token") : "",
      held ? `${bytes(held)} of cache` : "",
      speed ? `${short(speed)} tokens/s` : "",
    ].filter(Boolean);
    byId("live-line").textContent = parts.join(" · ");
    byId("live-line").hidden = !parts.length;
    byId("live-line").setAttribute("aria-label", `Live figures: ${parts.join(", ")}`);
  }
}

function placeRow({ drafted, accepted }, place) {
  const fill = element("i");
  fill.style.width = `${(100 * accepted) / drafted}%`;
  return element(
    "li",
    {},
    element("span", { class: "place", text: `${place + 1}` }),
    element("span", { class: "bar", "aria-hidden": "true" }, fill),
    element("span", { class: "share", text: `${count(accepted)} of ${count(drafted)}` }),
  );
}

function text(id, words) {
  const node = byId(id);
  if (node.textContent !== words) node.textContent = words;
}

function bar(id, share) {
  byId(id).style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
}
