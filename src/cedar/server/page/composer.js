// The message field with its pictures and the reasoning switch.

import { byId, composing, element, icon } from "./dom.js";
import { effortName } from "./format.js";
import { toast } from "./notices.js";
import { pictureFiles, readPicture } from "./pictures.js";

// The slider catches on the named efforts.
const NAMED = [50, 75, 100];
const CATCH = 2;

export class Composer {
  #form = byId("composer");
  #field = byId("message");
  #pictures = [];
  #accepts = false;
  #most = 0;
  #thinksByItself = false;
  #busy = false;
  #room = () => 0;

  /** act: {send(text, pictures), stop(), settings(change)}; room: pictures still allowed. */
  constructor(act, room) {
    this.#room = room;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(act);
    });
    this.#field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || composing(event)) return;
      event.preventDefault();
      this.#submit(act);
    });
    this.#field.addEventListener("input", () => this.#fit());
    byId("stop").addEventListener("click", () => act.stop());
    this.#listenForPictures();
    this.#listenForEffort(act);
  }

  /** What the model takes: {images, max_images, thinking, default_thinking}. */
  set state(state) {
    this.#thinksByItself = state.default_thinking;
    this.#accepts = state.images;
    this.#most = state.max_images;
    byId("attach").hidden = !state.images;
    byId("effort").hidden = !state.thinking;
  }

  set settings({ thinking, effort }) {
    byId("thinking").checked = thinking ?? this.#thinksByItself;
    byId("effort-level").value = effort;
    this.#showEffort();
  }

  /** While a reply is written the round button stops it. */
  set busy(busy) {
    this.#busy = busy;
    const focused = document.activeElement;
    const lost = focused === byId("send") || focused === byId("stop");
    byId("stop").hidden = !busy;
    byId("send").hidden = busy;
    if (lost) this.focus();
  }

  focus() {
    this.#field.focus();
  }

  /** Put a text into the field, for the person to go on with. */
  fill(text) {
    this.#field.value = text;
    this.#fit();
    this.focus();
  }

  clear() {
    this.fill("");
    this.#pictures = [];
    this.#showPictures();
  }

  #submit(act) {
    const text = this.#field.value;
    if (this.#busy || !(text.trim() || this.#pictures.length)) return;
    const pictures = this.#pictures;
    this.clear();
    act.send(text, pictures);
  }

  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`;
  }

  #listenForPictures() {
    const files = byId("files");
    byId("attach").addEventListener("click", () => files.click());
    files.addEventListener("change", async () => {
      await this.#add([...files.files]);
      files.value = "";
      this.focus();
    });
    this.#field.addEventListener("paste", (event) => {
      const pictures = pictureFiles(event.clipboardData);
      if (!pictures.length) return;
      event.preventDefault();
      this.#add(pictures);
    });
    const main = byId("main");
    const dragged = (event) => event.dataTransfer?.types.includes("Files");
    main.addEventListener("dragover", (event) => {
      if (!dragged(event)) return;
      event.preventDefault();
      main.classList.add("dropping");
    });
    main.addEventListener("dragleave", (event) => {
      if (!main.contains(event.relatedTarget)) main.classList.remove("dropping");
    });
    main.addEventListener("drop", (event) => {
      if (!dragged(event)) return;
      event.preventDefault();
      main.classList.remove("dropping");
      const pictures = pictureFiles(event.dataTransfer);
      if (pictures.length) this.#add(pictures);
      else toast("Only pictures can be added.");
    });
  }

  async #add(files) {
    if (!this.#accepts) {
      toast("This model takes no pictures.");
      return;
    }
    for (const file of files) {
      if (this.#room() - this.#pictures.length <= 0) {
        toast(`A chat can have ${this.#most} pictures at most.`);
        break;
      }
      try {
        this.#pictures.push(await readPicture(file));
      } catch (error) {
        toast(error.message);
      }
    }
    this.#showPictures();
  }

  #showPictures() {
    const list = byId("thumbnails");
    list.hidden = !this.#pictures.length;
    list.replaceChildren(
      ...this.#pictures.map((picture) => {
        const remove = () => {
          this.#pictures = this.#pictures.filter((each) => each !== picture);
          this.#showPictures();
          this.focus();
        };
        const label = `Remove ${picture.name}`;
        return element(
          "li",
          {},
          element("img", { src: picture.url, alt: picture.name }),
          element(
            "button",
            { type: "button", "aria-label": label, title: label, on: { click: remove } },
            icon("close"),
          ),
        );
      }),
    );
  }

  #listenForEffort(act) {
    const thinking = byId("thinking");
    const level = byId("effort-level");
    thinking.addEventListener("change", () => {
      this.#showEffort();
      act.settings({ thinking: thinking.checked });
    });
    level.addEventListener("input", (event) => {
      // Arrow keys step by one and must not be caught.
      const named = NAMED.find((name) => Math.abs(name - level.value) <= CATCH);
      if (named && event.isTrusted && level.matches(":active")) level.value = named;
      this.#showEffort();
    });
    level.addEventListener("change", () => act.settings({ effort: Number(level.value) }));
  }

  #showEffort() {
    const level = byId("effort-level");
    const on = byId("thinking").checked;
    const name = effortName(Number(level.value));
    level.disabled = !on;
    level.setAttribute("aria-valuetext", name ? `${level.value}, ${name}` : level.value);
    byId("effort-name").textContent = on ? [level.value, name].filter(Boolean).join(" ") : "off";
  }
}
