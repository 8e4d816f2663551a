// What this browser keeps of the page, as JSON: in localStorage for all tabs, in sessionStorage for
// this one. Where a browser keeps nothing, it holds until the page is closed.

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
  return saveIn(() => localStorage, name, value);
}

// As `save`, for the next page of this tab alone.
export function saveForTab(name, value) {
  return saveIn(() => sessionStorage, name, value);
}

// What the page before in this tab has saved for this one, once; null if nothing.
export function takeOfTab(name) {
  try {
    const body = sessionStorage.getItem(PREFIX + name);
    sessionStorage.removeItem(PREFIX + name);
    return JSON.parse(body);
  } catch {
    return null;
  }
}

// storage: a function, as a browser may refuse to name it.
function saveIn(storage, name, value) {
  try {
    storage().setItem(PREFIX + name, JSON.stringify(value));
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
