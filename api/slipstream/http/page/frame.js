// Rendering at most once a frame, and never most of the time.

const PAUSE = 3; // times what the last rendering took

export class Frame {
  #render;
  #isDue = false;
  #notBefore = 0;

  constructor(render) {
    this.#render = render;
  }

  // With the next frame, or a later one where rendering takes long; what is asked for until then is
  // rendered at once.
  ask() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => this.#tick());
  }

  // At once, if anything is due.
  flush() {
    if (!this.#isDue) return;
    this.#isDue = false;
    const begin = performance.now();
    this.#render();
    const end = performance.now();
    this.#notBefore = end + PAUSE * (end - begin);
  }

  #tick() {
    if (this.#isDue && performance.now() < this.#notBefore)
      requestAnimationFrame(() => this.#tick());
    else this.flush();
  }
}
