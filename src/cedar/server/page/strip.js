// The context as a strip: what the newest token's indexer selected, and the tokens before it.

import { count, counted } from "./format.js";

const TRAIL = 16;
const ROW = 18;
const GAP = 2;
const LINE = 3;
const STEP = 3;
const LEAST = 1.5;

/**
 * Selected token ranges as [x, width] in pixels, ascending and merged, every one wide enough to be
 * seen. ranges: [start, stop) by token, ascending.
 */
export function places(ranges, context, width) {
  const found = [];
  for (const [start, stop] of ranges) {
    const from = (Math.max(start, 0) / context) * width;
    const to = (Math.min(stop, context) / context) * width;
    if (to <= from) continue;
    const end = Math.min(Math.max(to, from + LEAST), width);
    const last = found.at(-1);
    if (last && from <= last[0] + last[1] + 0.25) last[1] = Math.max(last[1], end - last[0]);
    else found.push([Math.min(from, width - LEAST), end - Math.min(from, width - LEAST)]);
  }
  return found;
}

/** Ranges that touch become one; so [0, 2) and [2, 4) are one place. */
export function joined(ranges) {
  const found = [];
  for (const [start, stop] of ranges) {
    const last = found.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], stop);
    else found.push([start, stop]);
  }
  return found;
}

/** The selection in words. */
export function described(ranges, context, window) {
  if (!context) return "Nothing was generated yet.";
  const merged = joined(ranges);
  const tokens = merged.reduce((sum, [start, stop]) => sum + stop - start, 0);
  const where = `${count(tokens)} of ${counted(context, "token")} in ${counted(merged.length, "place")}`;
  if (!merged.length)
    return `Nothing selected yet: all ${counted(context, "token")} are in the window.`;
  if (!window) return where;
  return window < context
    ? `${where}, besides the last ${count(window)}`
    : `${where}; all are in the window, too`;
}

export class Strip {
  #canvas;
  #swatches;
  #trail = [];
  #now = null;

  /** swatches: elements whose background colours are used: {selected, window, cached}. */
  constructor(canvas, swatches) {
    this.#canvas = canvas;
    this.#swatches = swatches;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Forget the tokens before, as at the start of a reply. */
  restart() {
    this.#trail = [];
    this.#now = null;
    this.draw();
  }

  /** Show a step: {ranges, context, window, cached}; the one before joins the trail. */
  push(step) {
    const before = this.#now;
    if (before && before.context !== step.context)
      this.#trail = [before, ...this.#trail].slice(0, TRAIL);
    this.#now = step;
    this.draw();
  }

  draw() {
    const scale = window.devicePixelRatio || 1;
    const width = this.#canvas.clientWidth;
    const height = this.#canvas.clientHeight;
    if (!width) return;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    const context = this.#canvas.getContext("2d");
    context.scale(scale, scale);
    const colour = (name) => getComputedStyle(this.#swatches[name]).backgroundColor;
    const track = getComputedStyle(this.#canvas).getPropertyValue("outline-color");
    context.fillStyle = track;
    context.fillRect(0, 0, width, ROW);
    if (!this.#now) return;
    const { context: tokens, cached } = this.#now;
    this.#row(context, this.#now, { top: 0, height: ROW, tokens, width, colour });
    context.fillStyle = colour("cached");
    context.fillRect(0, ROW + GAP, (Math.min(cached, tokens) / tokens) * width, LINE);
    this.#trail.forEach((step, age) => {
      const top = ROW + GAP + LINE + GAP + age * STEP;
      context.globalAlpha = 1 - age / (TRAIL + 4);
      this.#row(context, step, { top, height: STEP, tokens, width, colour });
    });
    context.globalAlpha = 1;
  }

  #row(context, step, { top, height, tokens, width, colour }) {
    if (step.window) {
      const from = (Math.max(step.context - step.window, 0) / tokens) * width;
      const to = (Math.min(step.context, tokens) / tokens) * width;
      context.fillStyle = colour("window");
      context.fillRect(from, top, to - from, height);
    }
    context.fillStyle = colour("selected");
    for (const [left, wide] of places(step.ranges, tokens, width)) {
      context.fillRect(left, top, wide, height);
    }
  }
}
