// System prompt, sampling and tools of a chat.

import { defaultSettings, SAMPLING, toolsProblem } from "./conversation.js";
import { byId, element } from "./dom.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a place today.",
      parameters: {
        type: "object",
        properties: {
          place: { type: "string" },
          unit: { type: "string", enum: ["celsius", "fahrenheit"] },
        },
        required: ["place"],
      },
    },
  },
];

export class SettingsDialog {
  #dialog = byId("settings");
  #fields = new Map();
  #settings = defaultSettings();
  #changed;

  /** changed(settings) is called when the dialog closes with valid settings. */
  constructor(changed) {
    this.#changed = changed;
    for (const { name, label, ...limits } of SAMPLING) {
      const field = element("input", {
        type: "number",
        name,
        inputmode: "decimal",
        placeholder: "–",
        ...limits,
      });
      this.#fields.set(name, field);
      byId("s-sampling").append(element("label", { class: "field" }, label, field));
    }
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#done();
    });
    byId("settings-close").addEventListener("click", () => this.#dialog.close());
    byId("s-reset").addEventListener("click", () => this.#fill(defaultSettings()));
    byId("s-tools").addEventListener("input", () => this.#checkTools());
    byId("s-tools-example").addEventListener("click", () => {
      byId("s-tools").value = JSON.stringify(EXAMPLE, null, 2);
      this.#checkTools();
    });
  }

  open(settings) {
    this.#settings = settings;
    this.#fill(settings);
    this.#dialog.showModal();
  }

  close() {
    this.#dialog.close();
  }

  #fill(settings) {
    byId("s-system").value = settings.system;
    byId("s-stop").value = settings.stop.join("\n");
    byId("s-tools").value = settings.tools;
    byId("s-tool-choice").value = settings.toolChoice;
    for (const [name, field] of this.#fields) field.value = settings.sampling[name] ?? "";
    this.#checkTools();
  }

  #checkTools() {
    const problem = toolsProblem(byId("s-tools").value);
    byId("s-tools-problem").textContent = problem;
    // The form does not close on declarations that could not be sent.
    byId("s-tools").setCustomValidity(problem);
    byId("s-tools").setAttribute("aria-invalid", String(problem !== ""));
  }

  #done() {
    const sampling = {};
    for (const [name, field] of this.#fields) {
      if (field.value !== "") sampling[name] = field.valueAsNumber;
    }
    this.#changed({
      ...this.#settings,
      system: byId("s-system").value,
      stop: byId("s-stop")
        .value.split("\n")
        .filter((line) => line !== ""),
      tools: byId("s-tools").value,
      toolChoice: byId("s-tool-choice").value,
      sampling,
    });
    this.#dialog.close();
  }
}
