// Building elements without HTML strings.

const SVG = "http://www.w3.org/2000/svg";

/** An element: properties are attributes; `text`, `on` (listeners) and booleans are special. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") node.textContent = value;
    else if (name === "on")
      for (const [type, act] of Object.entries(value)) node.addEventListener(type, act);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** One of the page's symbols; decoration, so hidden from screen readers. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  picture.append(use);
  return picture;
}

/** A small button with a symbol; its name is its label and its tooltip. */
export function iconButton(name, label, act) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: act } },
    icon(name),
  );
}

/** Change the symbol and the name of an icon button. */
export function relabel(button, name, label) {
  button.querySelector("use").setAttribute("href", `#i-${name}`);
  button.setAttribute("aria-label", label);
  button.title = label;
}

export const byId = (id) => document.getElementById(id);

/** Whether a key only helps to compose a character; Safari tells it by the key code alone. */
export const composing = (event) => event.isComposing || event.keyCode === 229;
