"use strict";
// Divides the conversation into tokens where somebody looks, shades them, and shows the numbers of one.
// What a trajectory says reaches the page through textContent only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const total = data.text.length;
  const DEPTHS = 8;
  const root = document.documentElement.style;

  // --- measures: each has a column of numbers and a fixed scale, so that colours compare between pages -------------

  const signedRoot = (share) => Math.sign(share) * Math.sqrt(Math.abs(share));
  const MEASURES = {
    advantage: {
      column: data.advantage,
      share: (x) => signedRoot(x / 2),
      number: (share) => 2 * share * Math.abs(share),
      words: "Blue tokens turned out better than the critic expected and were made likelier, orange ones worse.",
    },
    ratio: {
      column: data.ratio,
      share: (x) => signedRoot(Math.log2(x) / 2),
      number: (share) => 4 ** (share * Math.abs(share)),
      words: "Blue tokens are likelier under the policy being trained than under the one that sampled them, " +
        "orange ones less likely; without shade the two agree.",
    },
    value: {
      column: data.value,
      share: (x) => x,
      number: (share) => share,
      words: "What the critic expects to be earned from here on: the bluer, the more; orange is below zero.",
    },
    logprob: {
      column: data.logprob,
      share: (x) => -Math.sqrt(Math.max(0, -x) / 5),
      number: (share) => -5 * share * share,
      hue: "odd",
      words: "The deeper the purple, the less likely the policy found the token when it sampled it.",
    },
    none: { column: null, words: "" },
  };
  let measure = MEASURES.none;

  // --- tokens -------------------------------------------------------------------------------------------------------

  const place = new Int32Array(total).fill(-1); // index among the sampled tokens
  let sampled = 0;
  for (const [start, stop] of data.sampled) for (let i = start; i < stop; i++) place[i] = sampled++;
  const rewards = new Map(data.rewards);
  const special = new Set(data.special);
  const continues = new Set(data.continues);

  const isRejected = (i) => data.kept !== null && place[i] >= 0 && data.kept[place[i]] === "0";

  function shareOf(i) {
    const x = measure.column === null || place[i] < 0 ? null : measure.column[place[i]];
    return x === null ? 0 : Math.max(-1, Math.min(1, measure.share(x)));
  }

  function shade(share, hue) {
    const depth = Math.round(Math.abs(share) * DEPTHS);
    return depth === 0 ? "" : ` ${hue ?? (share > 0 ? "high" : "low")} d${depth}`;
  }

  function classOf(i) {
    let name = "t" + shade(shareOf(i), measure.hue);
    if (isRejected(i)) name += " rejected";
    if (special.has(i)) name += " special";
    if (continues.has(i)) name += " continues";
    if (/^[ \t]+$/.test(data.text[i])) name += " blank";
    if (i === chosen) name += " chosen";
    return name;
  }

  function tokenSpan(i) {
    const span = document.createElement("span");
    span.dataset.i = i;
    span.className = classOf(i);
    data.text[i].split("\n").forEach((line, index) => {
      if (index > 0) {
        const end = document.createElement("span");
        end.className = "end";
        end.textContent = "\n";
        span.append(end);
      }
      span.append(line);
    });
    return span;
  }

  // --- chunks: plain text until they come near the window -----------------------------------------------------------

  const chunks = [...document.querySelectorAll(".chunk")].map((element) => ({
    element,
    start: Number(element.dataset.start),
    stop: Number(element.dataset.stop),
    text: element.textContent,
    divided: false,
  }));
  const chunkOfElement = new Map(chunks.map((chunk) => [chunk.element, chunk]));

  function chunkAt(i) {
    let low = 0;
    let high = chunks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (chunks[middle].start <= i) low = middle;
      else high = middle - 1;
    }
    return chunks[low];
  }

  function divide(chunk) {
    if (chunk.divided) return;
    chunk.divided = true;
    const spans = document.createDocumentFragment();
    for (let i = chunk.start; i < chunk.stop; i++) spans.append(tokenSpan(i));
    chunk.element.replaceChildren(spans);
  }

  function unite(chunk) {
    if (!chunk.divided || (chosen >= chunk.start && chosen < chunk.stop)) return;
    chunk.divided = false;
    chunk.element.textContent = chunk.text;
  }

  function spanOf(i) {
    const chunk = chunkAt(i);
    divide(chunk);
    return chunk.element.children[i - chunk.start];
  }

  // --- the card -----------------------------------------------------------------------------------------------------

  const card = document.getElementById("card");
  const numbers = document.getElementById("numbers");
  const docked = matchMedia("(max-width: 44rem)");
  const floating = matchMedia("(min-width: 44.01rem) and (max-width: 63.99rem)");
  let chosen = -1;

  const figures = (x) => (x === null || x === undefined ? "–" : x.toFixed(4).replace(/\.?0+$/, "").replace(/^-0$/, "0"));

  function versionAt(i) {
    let found = null;
    for (const [start, version] of data.versions) if (start <= i) found = version;
    return found;
  }

  function rowsOf(i) {
    const rows = [["token", `${i + 1} of ${total}`], ["id", String(data.id[i])]];
    const k = place[i];
    if (k < 0) return rows;
    const logprob = data.logprob[k];
    rows.push(["log-prob", `${figures(logprob)}`], ["probability", `${(100 * Math.exp(logprob)).toPrecision(3)} %`]);
    for (const name of ["ratio", "advantage", "value"]) if (data[name] !== null) rows.push([name, figures(data[name][k])]);
    rows.push(["version", String(versionAt(i))]);
    if (rewards.has(i)) rows.push(["reward", figures(rewards.get(i))]);
    return rows;
  }

  function remarkOf(i) {
    const remarks = [];
    if (place[i] < 0) remarks.push("given to the policy, not sampled");
    if (isRejected(i)) remarks.push("rejected: left out of the policy’s loss");
    if (special.has(i)) remarks.push("a control token of the model");
    if (continues.has(i)) remarks.push("more of the character before it");
    else if (continues.has(i + 1)) remarks.push("its last character goes on in the next token");
    return remarks.join("; ");
  }

  function element(name, text) {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  }

  function show(i) {
    const list = document.createElement("dl");
    for (const [name, value] of rowsOf(i)) list.append(element("dt", name), element("dd", value));
    numbers.replaceChildren(element("strong", JSON.stringify(data.text[i])), list);
    const remark = remarkOf(i);
    if (remark) numbers.append(element("p", remark));
    card.classList.remove("empty");
    const box = floating.matches ? spanOf(i).getClientRects()[0] : undefined;
    if (!box) return;
    const { offsetWidth: width, offsetHeight: height } = card;
    const below = box.bottom + 8;
    card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 16))}px`;
    card.style.top = `${below + height < innerHeight ? below : Math.max(8, box.top - height - 8)}px`;
  }

  function showChosen() {
    if (chosen >= 0) show(chosen);
    else card.classList.add("empty");
  }

  function choose(i, block) {
    const before = chosen;
    chosen = i;
    if (before >= 0 && before !== i) spanOf(before).className = classOf(before);
    showChosen();
    if (i < 0) return;
    const span = spanOf(i);
    span.className = classOf(i);
    if (block) span.scrollIntoView({ block });
    if (floating.matches) show(i);
  }

  const tokenAt = (event) => {
    const span = event.target instanceof Element ? event.target.closest(".t") : null;
    return span === null ? -1 : Number(span.dataset.i);
  };
  const turns = document.getElementById("turns");
  if (matchMedia("(hover: hover)").matches) {
    turns.addEventListener("mouseover", (event) => {
      const i = tokenAt(event);
      if (i >= 0) show(i);
      else showChosen();
    });
    turns.addEventListener("mouseleave", showChosen);
    addEventListener("scroll", () => floating.matches && showChosen(), { passive: true });
  }
  turns.addEventListener("click", (event) => {
    const i = tokenAt(event);
    if (getSelection().isCollapsed) choose(i === chosen ? -1 : i, docked.matches ? "nearest" : undefined);
  });
  const step = (by) => choose(Math.max(0, Math.min(total - 1, chosen + by)), "nearest");
  document.getElementById("back").addEventListener("click", () => step(-1));
  document.getElementById("on").addEventListener("click", () => step(1));
  document.getElementById("close").addEventListener("click", () => choose(-1));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") choose(-1);
    const text = document.activeElement?.closest(".text");
    if (!text || event.ctrlKey || event.metaKey || event.altKey) return;
    const first = Number(text.querySelector(".chunk").dataset.start);
    const last = Number([...text.querySelectorAll(".chunk")].at(-1).dataset.stop) - 1;
    const here = chosen >= first && chosen <= last;
    const goals = {
      ArrowRight: here ? Math.min(chosen + 1, last) : first,
      ArrowLeft: here ? Math.max(chosen - 1, first) : last,
      Home: first,
      End: last,
    };
    if (!(event.key in goals)) return;
    event.preventDefault();
    choose(goals[event.key], "nearest");
  });

  // --- where to go --------------------------------------------------------------------------------------------------

  const rejected = [];
  for (let i = 0; i < total; i++) if (isRejected(i)) rejected.push(i);
  const goals = {
    rejected,
    reward: data.rewards.map(([i]) => i),
    version: data.versions.slice(1).map(([i]) => i),
  };
  for (const [name, places] of Object.entries(goals)) {
    if (places.length === 0) continue;
    const button = element("button", `${name} ${places.length > 1 ? `(${places.length}) ` : ""}↓`);
    button.type = "button";
    button.addEventListener("click", () => choose(places.find((i) => i > chosen) ?? places[0], "center"));
    document.getElementById("jumps").append(button);
  }

  // --- the overview -------------------------------------------------------------------------------------------------

  const overview = document.getElementById("overview");

  function drawOverview() {
    const width = overview.clientWidth;
    const height = overview.clientHeight;
    const ratio = devicePixelRatio || 1;
    overview.width = width * ratio;
    overview.height = height * ratio;
    const pen = overview.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const columns = Math.min(total, Math.floor(width));
    const step = width / columns;
    const middle = measure.hue ? height : height / 2;
    for (let column = 0; column < columns; column++) {
      const start = Math.floor((column * total) / columns);
      const stop = Math.max(start + 1, Math.floor(((column + 1) * total) / columns));
      let [up, down, count, struck] = [0, 0, 0, 0];
      for (let i = start; i < stop; i++) {
        if (place[i] < 0) continue;
        const share = shareOf(i);
        if (share > 0) up += share;
        else down -= share;
        count++;
        struck += isRejected(i);
      }
      const x = column * step;
      const paint = (name, top, length) => {
        pen.fillStyle = name;
        pen.fillRect(x, top, Math.max(step - 0.5, 0.5), length);
      };
      if (count === 0) {
        pen.fillStyle = colour("line");
        pen.fillRect(Math.floor(x), 0, Math.ceil(x + step) - Math.floor(x), height);
        continue;
      }
      const [above, below] = [(up / count) * middle, (down / count) * middle];
      if (measure.hue) {
        paint(`rgb(${colour(measure.hue)})`, height - Math.max(1, below), Math.max(1, below));
      } else {
        paint(colour("line"), middle - 0.5, 1);
        paint(`rgb(${colour("high")})`, middle - above, above);
        paint(`rgb(${colour("low")})`, middle, below);
      }
      pen.globalAlpha = struck > 0 ? Math.max(0.3, struck / count) : 0;
      paint(colour("strike"), height - 3, 3);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = colour("accent");
    for (const [i] of data.versions.slice(1)) pen.fillRect((i / total) * width - 1, 0, 2, height);
  }

  overview.addEventListener("click", (event) => {
    const box = overview.getBoundingClientRect();
    const i = Math.floor(((event.clientX - box.left) / box.width) * total);
    choose(Math.max(0, Math.min(total - 1, i)), "center");
  });

  // --- the bar ------------------------------------------------------------------------------------------------------

  function drawScale() {
    const scale = document.getElementById("scale");
    scale.replaceChildren();
    if (measure.column === null) return;
    for (let depth = measure.hue ? 0 : -DEPTHS; depth <= DEPTHS; depth++) {
      const cell = document.createElement("div");
      const swatch = document.createElement("i");
      const share = depth / DEPTHS;
      swatch.className = shade(share, measure.hue).trim();
      cell.append(swatch);
      if (depth % (DEPTHS / 2) === 0) cell.append(element("em", String(Number(measure.number(share).toFixed(2)))));
      scale.append(cell);
    }
  }

  function shadeBy(name) {
    measure = MEASURES[name];
    document.getElementById("words").textContent = measure.words;
    overview.hidden = measure.column === null;
    drawScale();
    if (!overview.hidden) drawOverview();
    for (const chunk of chunks) {
      if (!chunk.divided) continue;
      for (const span of chunk.element.children) span.className = classOf(Number(span.dataset.i));
    }
  }

  const bar = document.getElementById("bar");
  bar.hidden = false;
  card.hidden = false;
  card.classList.add("empty");
  const radios = [...document.querySelectorAll("input[name=measure]")];
  for (const radio of radios) {
    radio.disabled = radio.value !== "none" && MEASURES[radio.value].column === null;
    if (radio.disabled) radio.parentElement.title = "not recorded for this trajectory";
    radio.addEventListener("change", () => shadeBy(radio.value));
  }
  const first = radios.find((radio) => !radio.disabled);
  first.checked = true;
  shadeBy(first.value);

  new ResizeObserver(() => {
    const jumps = document.getElementById("jumps").offsetHeight;
    root.setProperty("--jumps", docked.matches ? `${jumps}px` : "0px");
    root.setProperty("--bar", `${bar.offsetHeight - (docked.matches ? jumps : 0)}px`);
    if (!overview.hidden) drawOverview();
    showChosen();
  }).observe(bar);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shadeBy(radios.find((r) => r.checked).value));
  if (!turns.classList.contains("long")) {
    chunks.forEach(divide);
    return;
  }
  const nearby = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) (entry.isIntersecting ? divide : unite)(chunkOfElement.get(entry.target));
    },
    { rootMargin: "100% 0px" },
  );
  for (const chunk of chunks) nearby.observe(chunk.element);
})();
