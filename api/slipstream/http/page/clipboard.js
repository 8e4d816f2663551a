// Copying text, also where the page is not served over HTTPS or from this machine.

import { button } from "./elements.js";

const SAID_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // browsers give the clipboard to secure pages alone; this older way works on all
  const before = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  before?.focus();
  if (!isCopied) throw new Error("The browser does not allow copying.");
}

// A button that copies what `text()` gives, and says so.
export function copyButton(label, text) {
  let timer = null;
  return button("Copy", label, async (it) => {
    try {
      await copy(text());
      it.textContent = "Copied";
    } catch {
      it.textContent = "Failed";
    }
    it.setAttribute("aria-label", `${it.textContent}: ${label}`);
    clearTimeout(timer);
    timer = setTimeout(() => {
      it.textContent = "Copy";
      it.setAttribute("aria-label", label);
    }, SAID_MS);
  });
}
