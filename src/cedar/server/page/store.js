// Chats in this browser's storage, bounded. Without storage everything works until a reload.

const CHAT = "cedar.chat.";
const SETTINGS = "cedar.settings";
const CURRENT = "cedar.current";
export const LIMITS = { characters: 4_000_000, chats: 50 };

/**
 * Which stored texts must go so that the rest fits: ids, oldest first, never the newest.
 * entries: [{id, changed, size}].
 */
export function outgrown(entries, limits = LIMITS) {
  const newest = [...entries].sort((one, other) => other.changed - one.changed);
  const gone = [];
  let size = 0;
  newest.forEach((entry, place) => {
    size += entry.size;
    if (place > 0 && (size > limits.characters || place >= limits.chats)) gone.unshift(entry.id);
  });
  return gone;
}

/** A copy without the data of its pictures; their names stay. */
export function withoutPictures(chat) {
  const messages = chat.messages.map((message) =>
    message.images?.length
      ? { ...message, images: message.images.map(({ name }) => ({ name, url: "" })) }
      : message,
  );
  return { ...chat, messages };
}

export class Store {
  #storage;

  constructor(storage) {
    this.#storage = storage;
  }

  /** The chats, newest first; what cannot be read is left out. */
  chats() {
    return this.#keys()
      .map((key) => this.#read(key))
      .filter((chat) => chat?.id && Array.isArray(chat.messages) && chat.settings)
      .sort((one, other) => other.changed - one.changed);
  }

  chat(id) {
    return this.#read(CHAT + id);
  }

  /** Keep a chat; older ones make room. Returns false if it could not be kept whole. */
  save(chat) {
    const whole = JSON.stringify(chat);
    if (whole.length <= LIMITS.characters && this.#write(chat, whole)) return true;
    const lean = JSON.stringify(withoutPictures(chat));
    if (lean.length <= LIMITS.characters) this.#write(chat, lean);
    return false;
  }

  remove(id) {
    this.#storage?.removeItem(CHAT + id);
  }

  removeAll() {
    for (const key of this.#keys()) this.#storage.removeItem(key);
  }

  get settings() {
    return this.#read(SETTINGS);
  }

  set settings(value) {
    this.#set(SETTINGS, JSON.stringify(value));
  }

  get current() {
    return this.#read(CURRENT);
  }

  set current(id) {
    this.#set(CURRENT, JSON.stringify(id));
  }

  #write(chat, text) {
    const others = this.#keys()
      .filter((key) => key !== CHAT + chat.id)
      .map((key) => {
        const kept = this.#storage.getItem(key);
        return { id: key, changed: this.#read(key)?.changed ?? 0, size: kept.length };
      });
    const mine = { id: CHAT + chat.id, changed: Infinity, size: text.length };
    const leaving = outgrown([mine, ...others]);
    for (const key of leaving) this.#storage.removeItem(key);
    // Browsers differ in what they hold: give up more of the old until it fits.
    const rest = others
      .filter((entry) => !leaving.includes(entry.id))
      .sort((one, other) => one.changed - other.changed);
    while (!this.#set(CHAT + chat.id, text)) {
      const oldest = rest.shift();
      if (!oldest) return false;
      this.#storage.removeItem(oldest.id);
    }
    return true;
  }

  #keys() {
    const keys = [];
    for (let place = 0; place < (this.#storage?.length ?? 0); place += 1) {
      const key = this.#storage.key(place);
      if (key.startsWith(CHAT)) keys.push(key);
    }
    return keys;
  }

  #read(key) {
    try {
      return JSON.parse(this.#storage?.getItem(key) ?? "null");
    } catch {
      return null;
    }
  }

  #set(key, text) {
    if (!this.#storage) return true;
    try {
      this.#storage.setItem(key, text);
      return true;
    } catch {
      return false;
    }
  }
}

/** The browser's storage, or null where it is switched off. */
export function browserStorage() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
