// Light or dark: the system's, until the reader switches.
//
// The choice is kept in this browser. Switching back to what the system has follows it again.

import { load, remove, save } from "./storage.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}

// The button that switches; its word is what it switches to.
export function switchTheme(button) {
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  button.addEventListener("click", () => {
    const wanted = isDark() ? "light" : "dark";
    if ((wanted === "dark") === system.matches) {
      delete root.dataset.theme;
      remove("theme");
    } else {
      root.dataset.theme = wanted;
      save("theme", wanted);
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}

const kept = load("theme"); // before anything is painted: this module blocks rendering
if (kept === "light" || kept === "dark") root.dataset.theme = kept;
