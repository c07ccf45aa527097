// Puts the page together.

import { Api } from "./api.js";
import { showChats } from "./chat_list.js";
import { Composer } from "./composer.js";
import { defaultSettings, newChat, titleOf } from "./conversation.js";
import { byId, composing, element } from "./dom.js";
import { Drawer } from "./drawers.js";
import { asJson, asMarkdown, download, fileName } from "./exporting.js";
import { count } from "./format.js";
import { askForKey } from "./key_dialog.js";
import { Markdown } from "./markdown.js";
import { announce, toast } from "./notices.js";
import { Panel } from "./panel.js";
import { Session } from "./session.js";
import { SettingsDialog } from "./settings_dialog.js";
import { browserStorage, Store } from "./store.js";
import { themeButton } from "./theme_button.js";
import { Transcript } from "./transcript.js";

const OPENERS = [
  "Write a short letter to a friend about the sea",
  "List three trees and their heights in a table",
  "Tell me a story that begins with a locked door",
];

const api = new Api();
const store = new Store(browserStorage());
const panel = new Panel();
const chats = new Drawer(byId("chats"), byId("open-chats"), "(max-width: 1120px)");
const live = new Drawer(byId("live"), byId("open-live"), "(max-width: 860px)");

const transcript = new Transcript({
  root: byId("transcript"),
  scroller: byId("scroll"),
  toEnd: byId("to-end"),
  markdown: new Markdown(api),
  actions: {
    edit: (message, text) => session.edit(message, text),
    again: (message) => session.again(message),
    answer: (message, results) => session.answer(message, results),
  },
});

const composer = new Composer(
  {
    send: (text, pictures) => session.send(text, pictures),
    stop: () => session.stop(),
    settings: (change) => session.configure(change),
  },
  () => {
    const sent = session.chat.messages.reduce(
      (sum, message) => sum + (message.images?.length ?? 0),
      0,
    );
    return (session.state?.max_images ?? 0) - sent;
  },
);

const session = new Session({
  api,
  store,
  transcript,
  panel,
  settings: { ...defaultSettings(), ...store.settings },
  hooks: { key: askForKey, busy: showBusy, changed: showChanged },
});

const settings = new SettingsDialog((changed) => {
  session.configure(changed);
  composer.settings = session.chat.settings;
});

function showBusy(busy) {
  composer.busy = busy;
  // The button that began it may be gone: the keyboard goes on where messages are written.
  if (busy) toMessage();
  document.body.classList.toggle("busy", busy);
}

function showChanged() {
  const { chat } = session;
  const empty = chat.messages.length === 0;
  byId("welcome").hidden = !empty;
  document.title = empty ? "Cedar" : `${titleOf(chat)} · Cedar`;
  for (const id of ["export-json", "export-markdown"]) byId(id).disabled = empty;
  showChats(store.chats(), chat.id, { open: openChat, remove: removeChat });
}

function openChat(id) {
  const chat = id === session.chat.id ? session.chat : store.chat(id);
  if (!chat) return;
  chat.settings = { ...defaultSettings(), ...chat.settings };
  if (chat !== session.chat) session.open(chat);
  showBusy(session.busy && chat === session.chat);
  composer.settings = chat.settings;
  chats.close();
  toMessage();
}

/** Put the keyboard into the message field, where that does not open one on the screen. */
function toMessage() {
  if (matchMedia("(pointer: fine)").matches) composer.focus();
}

/** Go on with the chat that was open last. */
function openKept() {
  const kept = store.current ? store.chat(store.current) : null;
  if (kept?.messages?.length) openChat(kept.id);
  else session.open(session.chat);
}

function startChat() {
  session.open(newChat(session.chat.settings));
  showBusy(false);
  toMessage();
  announce("New chat");
}

function removeChat(id) {
  const chat = store.chat(id);
  store.remove(id);
  if (id === session.chat.id) startChat();
  else showChanged();
  toast("The chat was deleted.", {
    label: "Undo",
    act: () => {
      store.save(chat);
      showChanged();
    },
  });
}

function exportChat(write, ending, type) {
  const { chat, state } = session;
  download(write(chat, state?.model ?? ""), fileName(chat, ending), type);
}

async function connect() {
  const banner = byId("banner");
  banner.hidden = true;
  try {
    const state = await session.connect();
    composer.state = state;
    composer.settings = session.chat.settings;
    byId("model").textContent = state.model;
    byId("model").hidden = false;
    byId("welcome-note").textContent =
      `${state.model} can hold ${count(state.pool_tokens)} tokens of context here. ` +
      "The live figures show how little it keeps of each.";
    if (!session.busy) session.showFigures();
  } catch (failure) {
    const retry = element("button", {
      type: "button",
      class: "quiet",
      text: "Try again",
      on: { click: connect },
    });
    const words = element(
      "p",
      {},
      element("strong", { text: failure.message }),
      ` ${failure.detail ?? ""}`,
    );
    banner.replaceChildren(words, retry);
    banner.hidden = false;
  }
}

function listen() {
  byId("new-chat").addEventListener("click", startChat);
  byId("open-settings").addEventListener("click", () => settings.open(session.chat.settings));
  byId("export-json").addEventListener("click", () =>
    exportChat(asJson, "json", "application/json"),
  );
  byId("export-markdown").addEventListener("click", () =>
    exportChat(asMarkdown, "md", "text/markdown"),
  );
  byId("live-line").addEventListener("click", () => live.open());
  byId("backdrop").addEventListener("click", () => chats.close() || live.close());
  byId("s-forget-key").addEventListener("click", () => {
    api.key = "";
    toast("The key was forgotten.");
  });
  byId("s-delete-all").addEventListener("click", () => {
    settings.close();
    store.removeAll();
    startChat();
    toast("All chats were deleted.");
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || composing(event) || document.querySelector("dialog[open]"))
      return;
    if (chats.close() || live.close()) return;
    session.stop();
  });
  addEventListener("pagehide", () => session.keep());
  // Another tab has changed the list.
  addEventListener("storage", showChanged);
}

for (const words of OPENERS) {
  byId("openers").append(
    element("button", {
      type: "button",
      class: "opener",
      text: words,
      on: { click: () => composer.fill(words) },
    }),
  );
}
themeButton(() => panel.redraw());
listen();
composer.settings = session.chat.settings;
await connect();
// Not before: rendering kept replies may need the key that was just asked for.
if (!session.chat.messages.length) openKept();
