// What went wrong, in words that say what to do.

/** A failure to show. status is 0 where no answer came. */
export class Failure extends Error {
  constructor({ status = 0, title, detail = "", wait = 0, again = true }) {
    super(title);
    Object.assign(this, { status, title, detail, wait, again });
  }
}

export const unreachable = () =>
  new Failure({
    title: "The server cannot be reached.",
    detail: "Is it still running, and is the network up?",
  });

export const cutOff = () =>
  new Failure({
    title: "The connection ended before the reply was complete.",
    detail: "What had arrived by then is kept above.",
  });

export const notCedar = (kind) =>
  new Failure({
    title: "The answer is not a reply stream.",
    detail: `Expected text/event-stream, found ${kind || "no content type"}. Is a proxy in between?`,
  });

/** The failure of an answer that is not 2xx; body is its parsed JSON or null. */
export function fromAnswer(status, headers, body) {
  const said = body?.error?.message ?? (typeof body?.detail === "string" ? body.detail : "");
  const where = body?.error?.param;
  const wait = Math.min(Math.max(Number.parseFloat(headers.get("retry-after")) || 0, 0), 600);
  const detail = sentence(said) + (where && !said.includes(where) ? ` (${where})` : "");
  const [title, again] = headline(status);
  const id = status >= 500 && status !== 503 ? headers.get("x-request-id") : null;
  return new Failure({
    status,
    title,
    detail: [detail, id ? `Request ${id}.` : ""].filter(Boolean).join(" "),
    wait,
    again,
  });
}

/** The failure of an error that came within a stream. */
export function fromEvent(error) {
  const said = typeof error === "string" ? error : error?.message;
  return new Failure({
    title: "The server gave up on this reply.",
    detail: sentence(said ?? ""),
  });
}

function headline(status) {
  if (status === 401) return ["The server wants an API key.", true];
  if (status === 403) return ["The server does not allow this.", true];
  if (status === 404) return ["The server does not know this address or model.", true];
  if (status === 408) return ["The request took too long to arrive.", true];
  if (status === 413) return ["The request is too large.", false];
  if (status === 429) return ["The server has no room at the moment.", true];
  if (status === 503) return ["The server is not ready.", true];
  if (status >= 500) return ["Something went wrong in the server.", true];
  return ["The server cannot serve this request.", true];
}

function sentence(text) {
  const trimmed = String(text).trim();
  if (!trimmed) return "";
  const first = trimmed[0].toUpperCase() + trimmed.slice(1);
  return /[.!?)]$/.test(first) ? first : `${first}.`;
}
