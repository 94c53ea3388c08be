// The coloured completion: a text whose tokens carry their retention, the share of kv heads that still hold them when a
// later token is written. `data` is made by completion.py; `root` is an empty element that this class fills.
"use strict";

const LEVELS = 5; // shades of retention above 0; 0 means that no head of the selection holds the token
const BLOCK = 256; // tokens of a block, which ends at the next line break if one is near
const LIVES = 2; // a block without a line break ends after LIVES x BLOCK tokens

async function unpack(text, count, wide) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const codes = new Uint16Array(count);
  for (let i = 0; i < count; i++) codes[i] = planes[i] | (wide ? planes[count + i] << 8 : 0);
  return codes;
}

const grouped = (number) => number.toLocaleString("en-US");

class Completion {
  static async show(root, data) {
    const count = data.layers.length * data.heads * data.tokens.length;
    return new Completion(root, data, await unpack(data.codes, count, data.wide));
  }

  constructor(root, data, codes) {
    Object.assign(this, { root, data, codes });
    this.length = data.tokens.length;
    this.last = Math.max(this.length - 2, 0); // the last token is sampled but never fed, so it asks nothing
    this.query = this.last;
    this.token = null;
    this.pending = false;
    this.build();
    this.choose();
  }

  // ---- the page ---------------------------------------------------------------------------------------------------

  build() {
    const { data, root } = this;
    const id = (Completion.count = (Completion.count || 0) + 1);
    const layers = data.layers.map((layer, place) => `<option value="${place}">layer ${layer}</option>`).join("");
    const heads = Array.from({ length: data.heads }, (_, head) => `<option value="${head}">kv head ${head}</option>`);
    root.classList.add("completion");
    root.innerHTML = `
      <div class="controls">
        <label for="query${id}">time: the token that is being written</label>
        <canvas class="strip" height="28" aria-hidden="true"></canvas>
        <input class="query" id="query${id}" type="range" min="0" max="${this.last}" value="${this.query}">
        <div class="row">
          <button class="play" type="button" aria-pressed="false">Play</button>
          <button class="go" type="button">Go to this token</button>
          <label>layers <select class="layer"><option value="-1">all layers</option>${layers}</select></label>
          <label>heads <select class="head"><option value="-1">all kv heads</option>${heads.join("")}</select></label>
          <label>token <input class="token" type="number" min="0" max="${this.length - 1}" placeholder="click one"></label>
        </div>
        <p class="now" role="status"></p>
        <p class="legend"></p>
        <p class="about" hidden></p>
        <canvas class="lives" hidden role="img" aria-label="heads that hold the chosen token"></canvas>
      </div>
      <div class="text" tabindex="0" role="group" aria-label="the text; arrow keys move through time"></div>`;
    for (const name of ["query", "layer", "head", "token", "play", "go", "now", "legend", "about", "lives", "strip", "text"])
      this[`_${name}`] = root.querySelector(`.${name}`);
    this.legend();
    this.fill();
    this.listen();
  }

  legend() {
    const shades = Array.from({ length: LEVELS }, (_, i) => {
      const [from, to] = [Math.floor((100 * i) / LEVELS) + (i ? 0 : 1), Math.floor((100 * (i + 1)) / LEVELS)];
      return `<span class="key k${i + 1}">${from}–${to} %</span>`;
    });
    this._legend.innerHTML =
      `held by this share of the chosen heads: <span class="key k0">none: evicted</span> ${shades.join(" ")} ` +
      `<span class="key now-written">written now</span> <span class="key later">not yet written</span>` +
      (this.data.paged ? " A token of a closed page counts as not held: it is read through the page's summary." : "");
  }

  // The text is cut into blocks, of which the browser lays out and this class colours only those on the screen.
  fill() {
    const { tokens, parts } = this.data;
    const titles = new Map(parts.map(([start, ...part]) => [start, part]));
    let read = false;
    this.blocks = [];
    let block = null;
    const open = (start, title) => {
      if (title) {
        const heading = document.createElement("p");
        heading.className = "part";
        heading.textContent = title;
        this._text.append(heading);
      }
      block = { start, end: start, element: document.createElement("div"), seen: false };
      block.element.className = "block";
      this._text.append(block.element);
      this.blocks.push(block);
    };
    for (let token = 0; token < this.length; token++) {
      const size = block ? token - block.start : 0;
      const cut = size >= LIVES * BLOCK || (size >= BLOCK && tokens[token - 1].includes("\n"));
      if (titles.has(token)) open(token, titles.get(token)[0]);
      else if (token === 0) open(token, "prompt");
      else if (cut) open(token);
      if (titles.has(token)) read = titles.get(token)[1];
      block.element.classList.toggle("read", read);
      const span = document.createElement("span");
      const text = tokens[token];
      span.textContent = text.replaceAll("\n", "⏎\n").replaceAll("\t", "→\t") || "␣";
      if (!text) span.title = "a token without text";
      block.element.append(span);
      block.end = token + 1;
    }
    const watcher = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) this.blocks[entry.target.dataset.place].seen = entry.isIntersecting;
        this.soon();
      },
      { rootMargin: "200px" },
    );
    this.blocks.forEach((part, place) => {
      part.element.dataset.place = place;
      watcher.observe(part.element);
    });
  }

  listen() {
    this._query.addEventListener("input", () => this.at(Number(this._query.value)));
    this._layer.addEventListener("change", () => this.choose());
    this._head.addEventListener("change", () => this.choose());
    this._token.addEventListener("input", () => this.pick(this._token.value === "" ? null : Number(this._token.value)));
    this._play.addEventListener("click", () => this.play(!this.timer));
    this._go.addEventListener("click", () => this.scroll());
    this._strip.addEventListener("click", (event) => {
      this.at(Math.round((event.offsetX / this._strip.clientWidth) * this.length) - 1);
      this.scroll();
    });
    this._text.addEventListener("click", (event) => this.pick(this.place(event.target)));
    this._text.addEventListener("mouseover", (event) => this.hint(event.target));
    this._text.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1 };
      if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this.at(this.query + steps[event.key] * (event.shiftKey ? 32 : 1));
    });
    new ResizeObserver(() => this.soon()).observe(this._strip);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.soon());
  }

  // ---- what is chosen ---------------------------------------------------------------------------------------------

  choose() {
    const { data, length } = this;
    const [layer, head] = [Number(this._layer.value), Number(this._head.value)];
    this.rows = []; // first code of each chosen head
    for (let l = 0; l < data.layers.length; l++)
      for (let h = 0; h < data.heads; h++)
        if ((layer < 0 || l === layer) && (head < 0 || h === head)) this.rows.push((l * data.heads + h) * length);
    // evictions of the chosen heads by time, summed up: how many entries have left before each of `times`
    const left = new Float64Array(data.times.length + 1);
    for (const row of this.rows) for (let t = 0; t < length; t++) left[this.codes[row + t]]++;
    left[0] = 0;
    for (let i = 1; i < left.length; i++) left[i] += left[i - 1];
    this.left = left;
    this.draw();
  }

  at(query) {
    this.query = Math.min(Math.max(query, 0), this.last);
    this._query.value = this.query;
    this.soon();
  }

  play(on) {
    clearInterval(this.timer);
    this.timer = null;
    this._play.textContent = on ? "Pause" : "Play";
    this._play.setAttribute("aria-pressed", String(on));
    if (!on) return;
    if (this.query >= this.last) this.at(this.data.prompt);
    const step = Math.max(1, Math.round(this.length / 400));
    this.timer = setInterval(() => (this.query >= this.last ? this.play(false) : this.at(this.query + step)), 50);
  }

  // Bring the token that is being written into view.
  scroll() {
    const token = Math.min(this.query + 1, this.length - 1);
    const block = this.blocks.find(({ start, end }) => token >= start && token < end);
    block.element.children[token - block.start].scrollIntoView({ block: "nearest" });
    this._text.focus({ preventScroll: true });
  }

  place(element) {
    const block = element.closest(".block");
    if (!block || element === block) return null;
    return this.blocks[block.dataset.place].start + Array.prototype.indexOf.call(block.children, element);
  }

  hint(element) {
    const token = this.place(element);
    if (token !== null) element.title = this.words(token);
  }

  pick(token) {
    const valid = token !== null && Number.isInteger(token) && token >= 0 && token < this.length;
    this.token = valid ? token : null;
    if (valid) this._token.value = token;
    this.soon();
  }

  // ---- numbers ----------------------------------------------------------------------------------------------------

  // Number of eviction times up to the query: a code from 1 to this number means that the token has been evicted.
  passed() {
    const { times } = this.data;
    let [low, high] = [0, times.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= this.query) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Number of chosen heads that hold each of the tokens from `start` to `end` - 1.
  held(start, end, passed) {
    const counts = new Uint16Array(end - start);
    for (const row of this.rows)
      for (let t = start; t < end; t++) {
        const code = this.codes[row + t];
        if (code === 0 || code > passed) counts[t - start]++;
      }
    return counts;
  }

  level(count) {
    return count === 0 ? 0 : Math.max(1, Math.ceil((count / this.rows.length) * LEVELS));
  }

  words(token) {
    const name = `token ${grouped(token)} ${JSON.stringify(this.data.tokens[token])}`;
    if (token > this.query) return `${name}: not yet written`;
    const [held] = this.held(token, token + 1, this.passed());
    const times = this.rows.map((row) => this.codes[row + token]).filter((code) => code > 0);
    const first = times.length ? this.data.times[Math.min(...times) - 1] : null;
    const kept = this.rows.length - times.length;
    const fate = first === null ? "no head ever drops it" : `first dropped before token ${grouped(first)} is read`;
    return `${name}: held by ${held} of ${this.rows.length} heads; ${fate}; ${kept} keep it to the end`;
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------

  soon() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const passed = this.passed();
    for (const { start, end, element, seen } of this.blocks) {
      if (!seen) continue;
      const counts = this.held(start, Math.max(start, Math.min(end, this.query + 1)), passed);
      const spans = element.children;
      for (let t = start; t < end; t++) {
        let name = t > this.query + 1 ? "later" : t === this.query + 1 ? "now-written" : `k${this.level(counts[t - start])}`;
        if (t === this.token) name += " picked";
        const span = spans[t - start];
        if (span.className !== name) span.className = name;
      }
    }
    this.say(passed);
    this.strip(passed);
    this.lives();
  }

  say(passed) {
    const seen = this.query + 1;
    const held = (this.rows.length * seen - this.left[passed]) / this.rows.length;
    const share = ((100 * held) / seen).toFixed(1);
    const words = `Token ${grouped(seen + 1)} of ${grouped(this.length)} is being written. The query that predicts it sees ${grouped(
      Math.round(held),
    )} of the ${grouped(seen)} tokens before it, ${share} % (mean of ${this.rows.length} heads).`;
    this._now.textContent = words;
    this._query.setAttribute("aria-valuetext", words);
  }

  // Retention along the whole sequence: each column is the mean of some of its tokens.
  strip(passed) {
    const canvas = this._strip;
    const width = Math.max(1, Math.round(canvas.clientWidth));
    if (canvas.width !== width) canvas.width = width;
    const pen = canvas.getContext("2d");
    const colours = this.colours();
    pen.clearRect(0, 0, width, canvas.height);
    const most = Math.max(1, Math.floor(40000 / this.rows.length / 8)); // columns that are drawn exactly
    const columns = Math.min(width, this.length, Math.max(100, most * 8));
    for (let column = 0; column < columns; column++) {
      const start = Math.floor((column * this.length) / columns);
      const end = Math.max(start + 1, Math.floor(((column + 1) * this.length) / columns));
      if (start > this.query) break;
      const few = Math.min(end, start + 4, this.query + 1);
      const counts = this.held(start, few, passed);
      let sum = 0;
      for (const count of counts) sum += count;
      pen.fillStyle = colours[this.level(sum / counts.length)];
      pen.fillRect((column * width) / columns, 0, width / columns + 0.6, canvas.height - 6);
    }
    pen.fillStyle = colours.ink;
    pen.fillRect((this.data.prompt / this.length) * width, canvas.height - 6, 1.5, 6);
    pen.fillRect(((this.query + 1) / this.length) * width - 1, 0, 2, canvas.height);
  }

  colours() {
    const style = getComputedStyle(this.root);
    const colours = { ink: style.getPropertyValue("--ink") };
    for (let level = 0; level <= LEVELS; level++) colours[level] = style.getPropertyValue(`--k${level}`);
    return colours;
  }

  // One token: a square for each head, dark while the head holds it at this time.
  lives() {
    const { data, token } = this;
    this._about.hidden = this._lives.hidden = token === null;
    if (token === null) return;
    this._about.textContent = this.words(token) + ". Below: layers from left to right, kv heads from top to bottom.";
    this._lives.setAttribute("aria-label", this.words(token));
    const size = Math.max(4, Math.min(18, Math.floor(this.root.clientWidth / data.layers.length)));
    this._lives.width = size * data.layers.length;
    this._lives.height = size * data.heads;
    const pen = this._lives.getContext("2d");
    const colours = this.colours();
    const passed = this.passed();
    for (let l = 0; l < data.layers.length; l++)
      for (let h = 0; h < data.heads; h++) {
        const code = this.codes[(l * data.heads + h) * this.length + token];
        const held = token <= this.query && (code === 0 || code > passed);
        pen.fillStyle = held ? colours[code === 0 ? LEVELS : 3] : colours[0];
        pen.fillRect(l * size, h * size, size - 1, size - 1);
      }
  }
}
