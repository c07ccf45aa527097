// A chat as plain data, and what happens to it. No page elements in here.
//
// Messages: {role: "user", text, images: [{url, name}]},
// {role: "assistant", text, reasoning, calls: [{id, name, arguments}], finish, figures, ...},
// {role: "tool", call, name, text}.

export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: 0.05 },
  { name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top-k", min: 0, max: 1000000, step: 1 },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: 0.01 },
  { name: "max_completion_tokens", label: "Longest reply, tokens", min: 1, max: 1048576, step: 1 },
  { name: "seed", label: "Seed", min: 0, max: 9007199254740991, step: 1 },
];

export const defaultSettings = () => ({
  system: "",
  thinking: null,
  effort: 75,
  sampling: {},
  stop: [],
  tools: "",
  toolChoice: "auto",
});

export function newChat(settings) {
  const now = Date.now();
  const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return {
    id,
    title: "",
    created: now,
    changed: now,
    settings: structuredClone(settings),
    messages: [],
  };
}

export const newReply = () => ({
  role: "assistant",
  text: "",
  reasoning: "",
  calls: [],
  finish: null,
  figures: null,
});

/** A title from the first words that were said. */
export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  if (!first) return "New chat";
  const line = first.text.trim().split("\n")[0];
  if (!line) return first.images?.length ? "A picture" : "New chat";
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** Calls of the last reply that wait for a result. */
export function openCalls(chat) {
  const last = chat.messages.findLastIndex((message) => message.role === "assistant");
  if (last < 0) return [];
  const answered = new Set(chat.messages.slice(last + 1).map((message) => message.call));
  return chat.messages[last].calls.filter((call) => !answered.has(call.id));
}

/** Problems of a tools field; "" when it can be sent. */
export function toolsProblem(text) {
  if (!text.trim()) return "";
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}.`;
  }
  if (!Array.isArray(tools)) return "Expected a JSON list of tools, in square brackets.";
  const odd = tools.findIndex(
    (tool) => tool?.type !== "function" || typeof tool?.function?.name !== "string",
  );
  if (odd >= 0)
    return `Tool ${odd + 1} is not of the form {"type": "function", "function": {"name": …}}.`;
  return "";
}

/** The body of a Chat Completions request for the chat as it is. */
export function requestBody(chat, state) {
  const { settings } = chat;
  // A reply that failed before its first word was never part of the conversation.
  const said = chat.messages.filter(
    (each) => each.role !== "assistant" || each.text || each.calls.length,
  );
  const messages = said.map(requestMessage);
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = {
    model: state.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (state.thinking) {
    const reason = settings.thinking ?? state.default_thinking;
    body.reasoning_effort = reason ? settings.effort : "none";
  }
  for (const { name } of SAMPLING) {
    const value = settings.sampling[name];
    if (typeof value === "number") body[name] = value;
  }
  if (settings.stop.length) body.stop = settings.stop;
  if (settings.tools.trim() && !toolsProblem(settings.tools)) {
    const tools = JSON.parse(settings.tools);
    if (tools.length) Object.assign(body, { tools, tool_choice: settings.toolChoice });
  }
  return body;
}

function requestMessage(message) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.call, content: message.text };
  }
  if (message.role === "assistant") {
    const sent = { role: "assistant", content: message.text };
    if (message.reasoning) sent.reasoning_content = message.reasoning;
    if (message.calls.length) {
      sent.tool_calls = message.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return sent;
  }
  const pictures = (message.images ?? []).filter((image) => image.url);
  if (!pictures.length) return { role: "user", content: message.text };
  const parts = pictures.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  if (message.text) parts.push({ type: "text", text: message.text });
  return { role: "user", content: parts };
}

/** Apply one streamed chunk to a reply. */
export function applyChunk(reply, chunk) {
  const choice = chunk.choices?.[0];
  if (choice) {
    const delta = choice.delta ?? {};
    reply.text += delta.content ?? "";
    reply.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) applyCall(reply.calls, part);
    if (choice.finish_reason) reply.finish = choice.finish_reason;
  }
  if (chunk.cedar) reply.figures = { ...reply.figures, ...chunk.cedar };
  if (chunk.usage) reply.usage = chunk.usage;
}

function applyCall(calls, part) {
  const place = part.index ?? 0;
  while (calls.length <= place) calls.push({ id: `call-${calls.length}`, name: "", arguments: "" });
  const call = calls[place];
  if (part.id) call.id = part.id;
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}
