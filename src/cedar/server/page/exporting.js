// A chat as a file: JSON with everything, or Markdown to read.

import { pretty } from "./call_view.js";
import { titleOf } from "./conversation.js";
import { element } from "./dom.js";

export function asJson(chat, model) {
  const { title, created, changed, settings, messages } = chat;
  const when = (time) => new Date(time).toISOString();
  const whole = {
    format: "cedar-chat",
    version: 1,
    model,
    title,
    created: when(created),
    changed: when(changed),
  };
  return JSON.stringify({ ...whole, settings, messages }, null, 2);
}

export function asMarkdown(chat, model) {
  const parts = [
    `# ${titleOf(chat)}`,
    `${model}, ${new Date(chat.created).toISOString().slice(0, 10)}`,
  ];
  if (chat.settings.system.trim()) parts.push("## System", chat.settings.system.trim());
  for (const message of chat.messages) parts.push(...messageParts(message));
  return `${parts.join("\n\n")}\n`;
}

function messageParts(message) {
  if (message.role === "user") {
    const pictures = (message.images ?? []).map(({ name }) => `*(picture: ${name})*`);
    return ["## You", ...pictures, message.text].filter(Boolean);
  }
  if (message.role === "tool")
    return [`### Result of \`${message.name}\``, fenced(message.text, "")];
  const parts = ["## Reply"];
  if (message.reasoning)
    parts.push("<details><summary>Reasoning</summary>", message.reasoning.trim(), "</details>");
  if (message.text.trim()) parts.push(message.text.trim());
  for (const call of message.calls)
    parts.push(`### Call of \`${call.name}\``, fenced(pretty(call.arguments), "json"));
  return parts;
}

/** A code block whose fence is longer than any in the text. */
function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((run) => run[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** A file name from a chat's title. */
export function fileName(chat, ending) {
  const plain = titleOf(chat).normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  const words = plain.match(/[a-z0-9]+/g) ?? ["chat"];
  return `${words.join("-").slice(0, 50)}.${ending}`;
}

export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
