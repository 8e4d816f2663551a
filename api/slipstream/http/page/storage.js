// What this browser keeps of the page, as JSON, in localStorage. Where a browser keeps nothing, it
// holds until the page is closed.

const PREFIX = "slipstream.";

// null if there is nothing, or nothing of ours.
export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

// Whether there was room.
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function remove(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // nothing is kept
  }
}

// The names that begin so.
export function names(beginning) {
  try {
    const all = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX + beginning));
    return all.map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}

// Calls `told` with the name of what another tab has changed; null for everything.
export function onChange(told) {
  addEventListener("storage", ({ key }) => {
    if (key === null) told(null);
    else if (key.startsWith(PREFIX)) told(key.slice(PREFIX.length));
  });
}
