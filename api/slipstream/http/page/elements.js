// Making elements: text is always text, never markup.

// props: properties of the element, but `dataset` and `attributes`, which are objects of their own.
export function element(tag, { dataset = {}, attributes = {}, ...props } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  Object.assign(made.dataset, dataset);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

// A button whose visible word is said with what it belongs to: "Copy" of "Copy answer 2".
export function button(word, label, onClick) {
  const made = element("button", { type: "button", className: "small", textContent: word });
  made.setAttribute("aria-label", label);
  made.addEventListener("click", () => onClick(made));
  return made;
}
