// The list of kept chats.

import { titleOf } from "./conversation.js";
import { byId, element, iconButton } from "./dom.js";

/** Show the chats, newest first; act: {open(id), remove(id)}. */
export function showChats(chats, current, act) {
  byId("no-chats").hidden = chats.length > 0;
  byId("chat-list").replaceChildren(
    ...chats.map((chat) => {
      const title = titleOf(chat);
      const open = element("button", {
        type: "button",
        class: "chat-title",
        text: title,
        title,
        "aria-current": chat.id === current ? "true" : null,
        on: { click: () => act.open(chat.id) },
      });
      return element(
        "li",
        {},
        open,
        iconButton("delete", `Delete “${title}”`, () => act.remove(chat.id)),
      );
    }),
  );
}
