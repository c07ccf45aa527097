// Light, dark, or like the system.

import { byId, relabel } from "./dom.js";

const NAMES = { auto: "like the system", light: "light", dark: "dark" };
const NEXT = { auto: "light", light: "dark", dark: "auto" };

/** Let the theme button work; changed() is called after every change, also of the system's. */
export function themeButton(changed) {
  const root = document.documentElement;
  const button = byId("theme");
  let theme = root.dataset.theme ?? "auto";
  const show = () => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    relabel(button, theme, `Theme: ${NAMES[theme]}`);
  };
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    try {
      localStorage.setItem("cedar.theme", theme);
    } catch {
      // The choice lasts until the page is closed.
    }
    show();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}
