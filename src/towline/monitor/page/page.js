"use strict";
// The page of a bridge. Every text from the bridge becomes a text node, so that markup in it stays text.

const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setData(element, name, value) {
  if (element.dataset[name] !== String(value)) element.dataset[name] = value;
}

// -- numbers, with units ----------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minutes = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const dayClock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function durationText(seconds) {
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 100) return `${short.format(seconds)} s`;
  if (seconds < 6000) return `${short.format(seconds / 60)} min`;
  if (seconds < 360000) return `${short.format(seconds / 3600)} h`;
  return seconds < 31536000 ? `${whole.format(seconds / 86400)} days` : "over a year";
}

function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (bytes >= 1000 && power < units.length - 1) { bytes /= 1000; power += 1; }
  return `${power ? short.format(bytes) : whole.format(bytes)} ${units[power]}`;
}

function timeText(at) {
  const date = new Date(at * 1000);
  return date.toDateString() === new Date().toDateString() ? clock.format(date) : dayClock.format(date);
}

const unitTexts = { messages: whole.format, bytes: bytesText, s: durationText, "/s": (rate) => `${(rate < 10 ? short : whole).format(rate)} /s`, at: timeText };

function valueText(value, unit) {
  if (value === null || value === undefined) return "unknown";
  return unit ? unitTexts[unit](value) : String(value);
}

// -- asking the server ------------------------------------------------------------------------------------------------

const client = { signed_in: false, read_only: true, can_sign_in: false };

async function ask(path, method = "GET") {
  const response = await fetch(path, { method, credentials: "same-origin" });
  if (response.status === 401 && client.signed_in) {
    location.reload();
    throw new Error("The session has ended. Sign in again.");
  }
  const text = await response.text();
  if (!response.ok) throw new Error(text.trim() || `The bridge answers ${response.status}.`);
  return JSON.parse(text);
}

async function call(command, parameters = []) {
  const query = new URLSearchParams(parameters.filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const answer = await ask(`/page/call/${command}?${query}`, "POST");
  if (answer.result === null) throw new Error(answer.error);
  return answer.result;
}

// -- the stream of states ---------------------------------------------------------------------------------------------

const shown = { table: null, line: null, name: location.hash ? decodeURIComponent(location.hash.slice(1)) : "", filter: "", sort: null, ascending: true };
let source = null, lostAt = null, retryTimer = 0;

function connect() {
  disconnect();
  if (document.hidden) return;  // a page that nobody sees asks for nothing
  source = new EventSource(`/page/events?line=${encodeURIComponent(shown.name)}`);
  source.addEventListener("state", (event) => { showConnected(); showTable(JSON.parse(event.data)); });
  source.addEventListener("line", (event) => showLine(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    lostAt = lostAt ?? Date.now() / 1000;
    retryTimer = setTimeout(retry, 1500);
  });
}

function disconnect() {
  clearTimeout(retryTimer);
  if (source) source.close();
  source = null;
}

async function retry() {
  if (lostAt === null) return;
  document.body.classList.add("stale");
  setData($("connection"), "lost", true);
  setText($("connection"), `no answer since ${timeText(lostAt)}, trying again`);
  try {
    await ask("/page/access");  // tells a session that has ended from a bridge that does not answer
  } catch { /* shown above */ }
  connect();
}

function showConnected() {
  clearTimeout(retryTimer);
  if (lostAt !== null && shown.name) loadHistory();
  lostAt = null;
  document.body.classList.remove("stale");
  setData($("connection"), "lost", false);
  setText($("connection"), `live · ${clock.format(new Date())}`);
}

document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : (connect(), shown.name && loadHistory())));

// -- the table of lines -----------------------------------------------------------------------------------------------

const columns = [
  { key: "level", title: "State", text: (row) => row.state, wide: true },
  { key: "name", title: "Line", wide: true },
  { key: "direction", title: "Way", text: (row) => (row.direction === "up" ? "MQTT → Kafka" : "Kafka → MQTT") },
  { key: "topics", title: "Topics", text: (row) => row.topics.join(", "), wide: true, free: true },
  { key: "guarantee", title: "Guarantee", text: (row) => row.guarantee.replaceAll("_", " ") || "unknown" },
  { key: "rate_in", title: "In", unit: "/s" },
  { key: "rate_out", title: "Out", unit: "/s" },
  { key: "waiting", title: "Waiting", unit: "messages" },
  { key: "lag_s", title: "Oldest", unit: "s" },
  { key: "adds_up", title: "Account", text: (row) => accountText(row), free: true },
];
function accountText(row) {
  const letters = row.dead_lettered ? `, ${whole.format(row.dead_lettered)} dead letters` : "";
  return row.adds_up === null ? "unknown" : `${row.adds_up ? "adds up ✓" : "does not add up ✗"}${letters}`;
}

const levels = ["bad", "warn", "unknown", "good"];
const tableRows = new Map();

function makeHeader() {
  for (const column of columns) {
    const sort = () => {
      shown.ascending = shown.sort === column ? !shown.ascending : !column.unit;
      shown.sort = column;
      showTable(shown.table);
    };
    column.header = el("th", { scope: "col", class: column.unit ? "num" : "" }, el("button", { type: "button", onclick: sort }, column.title));
    $("lines").tHead.rows[0].append(column.header);
  }
}

function rowElement(row) {
  const cells = columns.map((column) => el("td", { class: `${column.unit ? "num" : ""} ${column.wide ? "wide" : ""} ${column.free ? "free" : ""}`, "data-label": column.wide ? null : column.title }));
  cells[0].append(el("span", { class: "state" }));
  cells[1].append(el("button", { type: "button", class: "name" }, row.name));
  const element = el("tr", { class: "row", "aria-selected": "false", onclick: () => choose(row.name) }, ...cells);
  return { element, cells };
}

function sortRows(rows) {
  if (shown.sort === null) return rows;
  const { key, text } = shown.sort, sign = shown.ascending ? 1 : -1;
  const value = (row) => (key === "level" ? levels.indexOf(row.level) : text ? text(row) : row[key] ?? -1);
  return rows.toSorted((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
}

function showTable(table) {
  shown.table = table;
  if (table === null) return;
  if (table.error) {
    setText($("verdict"), table.error);
    setData($("verdict"), "level", "bad");
    return;
  }
  setText($("bridge-name"), table.bridge ?? "");
  setText($("verdict"), table.verdict);
  setData($("verdict"), "level", table.level);
  showList($("notes"), table.notes);
  const updated = table.updated ? `last state ${timeText(table.updated)}` : "never started";
  setText($("facts"), [`Spark ${table.spark}`, `Kafka ${table.kafka}`, ...(table.running ? [] : [updated])].join("   ·   "));
  setText($("footer"), `Towline ${table.version ?? ""} (${table.revision ?? ""})   ·   ${table.state_dir}   ·   times are local`);
  const wanted = shown.filter.toLowerCase();
  const rows = sortRows(table.lines).filter((row) => !wanted || JSON.stringify([row.name, row.state, row.topics, row.guarantee]).toLowerCase().includes(wanted));
  setText($("shown"), rows.length === table.lines.length ? whole.format(rows.length) : `${whole.format(rows.length)} of ${whole.format(table.lines.length)}`);
  for (const column of columns) {
    const order = shown.sort === column ? (shown.ascending ? "ascending" : "descending") : "none";
    if (column.header.getAttribute("aria-sort") !== order) column.header.setAttribute("aria-sort", order);
  }
  const body = $("lines").tBodies[0], elements = rows.map(showRow);
  if (elements.length !== body.rows.length || elements.some((element, index) => body.rows[index] !== element)) {
    const focused = document.activeElement;
    body.replaceChildren(...elements);
    if (focused !== document.activeElement && body.contains(focused)) focused.focus();
  }
  const names = new Set(table.lines.map((row) => row.name));
  for (const name of tableRows.keys()) if (!names.has(name)) tableRows.delete(name);
  if (!names.has(shown.name) && table.lines.length) choose(table.lines[0].name);
  const row = table.lines.find((line) => line.name === shown.name);
  if (row) addSample(row, table.updated);
}

function showRow(row) {
  if (!tableRows.has(row.name)) tableRows.set(row.name, rowElement(row));
  const { element, cells } = tableRows.get(row.name);
  columns.forEach((column, index) => {
    const text = column.text ? column.text(row) : valueText(row[column.key], column.unit ?? "");
    setText(index < 2 ? cells[index].firstChild : cells[index], text);
  });
  setData(cells[0].firstChild, "level", row.level);
  const selected = String(row.name === shown.name);
  if (element.getAttribute("aria-selected") !== selected) element.setAttribute("aria-selected", selected);
  return element;
}

function showList(list, texts) {
  if (list.dataset.texts === JSON.stringify(texts)) return;
  list.dataset.texts = JSON.stringify(texts);
  list.replaceChildren(...texts.map((text) => el("li", {}, text)));
}

// -- the chosen line --------------------------------------------------------------------------------------------------

function choose(name) {
  if (name === shown.name && shown.line) return;
  shown.name = name;
  shown.line = null;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  if (shown.table) shown.table.lines.forEach(showRow);
  connect();
  loadHistory();
}

function showLine(line) {
  if (line === null || line.name !== shown.name) return;
  const isNew = shown.line?.name !== line.name;
  if (!isNew && shown.line.state !== line.state) setTimeout(loadHistory, 2500);  // a fault has begun or ended
  shown.line = line;
  $("line").hidden = false;
  setText($("line-title"), line.name);
  if (isNew) $("line-state").replaceChildren(el("span", { class: "state" }));
  setText($("line-state").firstChild, line.state);
  setData($("line-state").firstChild, "level", line.level);
  setText($("routes"), line.routes.map(([from, to]) => `${from} → ${to}`).join("   ·   "));
  const promise = line.promise ? `Guarantee ${line.guarantee.replaceAll("_", " ")}. Lost: ${line.promise.lost}. Doubled: ${line.promise.doubled}.` : "Guarantee unknown: no gateway answers.";
  setText($("promise"), promise);
  showPicture(line);
  showAccount(line.status.account ?? line.status.last?.account ?? null, line.status.account ? null : line.status.last?.heard);
  showList($("advice"), line.advice);
  showActions(line);
  if (isNew && time.columns) drawCharts();
}

// The stations of a message from devices to Kafka, from what status says of the line.
function nodesOf(line) {
  const { status, direction } = line, account = status.account ?? {}, gateways = Object.values(status.gateway?.gateways ?? (status.gateway ? { "": status.gateway } : {}));
  const answering = gateways.filter((gateway) => gateway.away_since === undefined);
  const offline = answering.find((gateway) => gateway.state !== "online");
  const sum = (values) => (values.length && values.every((value) => value !== undefined && value !== null) ? values.reduce((total, value) => total + value, 0) : null);
  const disks = answering.map((gateway) => gateway.measured?.[direction === "up" ? "inbox" : "outbox"] ?? {});
  const text = (label, values) => (values.length ? [[label, [...new Set(values)].join(", "), ""]] : []);
  const number = (label, value, unit) => (value === null || value === undefined ? [] : [[label, value, unit]]);
  const [mqttRate, kafkaRate] = direction === "up" ? [line.rate_in, line.rate_out] : [line.rate_out, line.rate_in];
  const broker = [
    ...text("address", answering.map((gateway) => gateway.broker).filter(Boolean)),
    ...text("client id", answering.map((gateway) => gateway.client_id).filter(Boolean)),
    ...number("not acknowledged", sum(answering.map((gateway) => (direction === "up" ? gateway.unacknowledged : gateway.outbox?.in_flight))), "messages"),
  ];
  const gateway = [
    ...(gateways.length > 1 ? [["gateways", `${answering.length} of ${gateways.length} answer`, ""]] : []),
    ...number("waiting", line.waiting, "messages"), ...number("oldest", line.lag_s, "s"),
    ...number("on disk", sum(disks.map((disk) => disk.bytes_on_disk)), "bytes"),
    ...number("room left", disks.length ? Math.min(...disks.map((disk) => disk.room_left ?? Infinity)) : null, "bytes").filter(([, value]) => Number.isFinite(value)),
    ...text("throttled", answering.map((each) => each.held_back || each.outbox?.held_back).filter(Boolean)),
    ...(direction === "up" ? outageBudgets(line, answering, disks) : []),
  ];
  const queryLevel = line.paused ? "warn" : status.query === "running" && line.spark === "running" ? "good" : status.query === "stopped" ? "bad" : "warn";
  const kafka = [...number("written", account.in_kafka, "messages"), ...number("dead letters", account.dead_lettered, "messages"), ...number("records not read", account.behind, "messages")];
  const nodes = [
    { key: "devices", title: "Devices", level: "unknown", state: "", facts: [], rate: mqttRate },
    { key: "broker", title: "MQTT broker", level: !answering.length ? "unknown" : offline ? "warn" : "good", state: !answering.length ? "unknown" : offline ? offline.state : "connected", facts: broker, rate: mqttRate },
    { key: "gateway", title: "Gateway", level: status.gateway_running ? "good" : "bad", state: status.gateway_running ? "running" : "does not answer", facts: gateway, rate: kafkaRate },
    { key: "spark", title: "Spark", level: queryLevel, state: line.spark === "running" ? status.query : line.spark, facts: number("last batch", line.batch_s, "s"), rate: kafkaRate },
    { key: "kafka", title: "Kafka", level: { reachable: "good", unknown: "unknown" }[line.kafka] ?? "bad", state: line.kafka, facts: kafka, rate: null },
  ];
  return direction === "up" ? nodes : nodes.reverse();
}

// How long intake can go on without Kafka, and the broker hold without the gateway, at the rate of the last five minutes.
const meters = new Map();

function outageBudgets(line, answering, disks) {
  const now = performance.now() / 1000, budgets = { "intake without Kafka": [], "broker without gateway": [] };
  answering.forEach((gateway, index) => {
    const key = `${line.name}/${gateway.name}`, disk = disks[index], sample = [now, gateway.received, disk.bytes_written];
    const samples = meters.get(key) ?? [];
    if (samples.length && samples.at(-1)[1] > sample[1]) samples.length = 0;
    samples.push(sample);
    while (now - samples[0][0] > 300) samples.shift();
    meters.set(key, samples);
    const seconds = now - samples[0][0], [messages, bytes] = [1, 2].map((column) => (sample[column] - samples[0][column]) / seconds);
    if (seconds < 5 || !messages) return;
    if (gateway.ack_after !== "kafka" && disk.room_left !== undefined && bytes) budgets["intake without Kafka"].push(disk.room_left / bytes);
    if (line.broker_queue_messages) budgets["broker without gateway"].push(line.broker_queue_messages / messages);
  });
  return Object.entries(budgets).filter(([, values]) => values.length).map(([label, values]) => [label, Math.min(...values), "s"]);
}

function showPicture(line) {
  line.nodes = nodesOf(line);
  const picture = $("picture"), shape = JSON.stringify(line.nodes.map((node) => [node.key, node.facts.map(([label]) => label)]));
  if (picture.dataset.shape !== line.name + shape) {
    picture.dataset.shape = line.name + shape;
    picture.replaceChildren();
    line.nodes.forEach((node, index) => {
      const facts = el("dl", {}, ...node.facts.flatMap(([label, , unit]) => [el("dt", { class: unit ? "" : "text" }, label), el("dd", { class: unit ? "" : "text" })]));
      picture.append(el("li", { class: "node", "data-key": node.key }, el("span", { class: "title" }, node.title), el("span", { class: "state" }), facts));
      if (index < line.nodes.length - 1) picture.append(el("li", { class: "arrow" }));
    });
  }
  line.nodes.forEach((node, index) => {
    const element = picture.children[2 * index], state = element.querySelector(".state");
    setData(element, "level", node.level);
    setData(state, "level", node.level);
    state.hidden = !node.state;
    setText(state, node.state);
    element.querySelectorAll("dd").forEach((cell, fact) => setText(cell, valueText(node.facts[fact][1], node.facts[fact][2])));
    if (index < line.nodes.length - 1) setText(picture.children[2 * index + 1], rateBetween(line, index));
  });
}

function rateBetween(line, index) {
  const node = line.direction === "up" ? line.nodes[index] : line.nodes[index + 1];
  return node.rate === null ? "rate unknown" : `${whole.format(node.rate)} /s`;
}

const kinds = { in_kafka: "delivered", delivered: "delivered", waiting: "waiting", arriving: "waiting", lost: "lost", left_out: "lost", skipped: "lost", dead_lettered: "dead", refused: "dead" };

function showAccount(account, lastAt) {
  const text = $("account"), bar = $("account-bar"), key = JSON.stringify([account, lastAt]);
  if (text.dataset.key === key) return;
  text.dataset.key = key;
  if (account === null) {
    bar.replaceChildren();
    text.replaceChildren("Unknown: no gateway answers.");
    return;
  }
  // The first keys are those of the parts, in their order; the first part is the sum.
  const keys = Object.keys(account), [[totalLabel, total], ...others] = account.parts;
  const parts = others.map(([label, count, remark], index) => ({ label, count, remark, key: keys[index + 1], kind: kinds[keys[index + 1]] ?? "other" }))
    .filter((part) => part.count || ["in_kafka", "delivered", "waiting"].includes(part.key));
  bar.replaceChildren(...parts.filter((part) => part.count > 0).map((part) => {
    const piece = el("span", { "data-kind": part.kind });
    piece.style.flexGrow = part.count;
    return piece;
  }));
  const sum = [`${totalLabel} ${whole.format(total)} = `];
  parts.forEach((part, index) => {
    if (index) sum.push(" + ");
    sum.push(el("span", { "data-kind": part.kind }, `${part.label} ${whole.format(part.count)}${part.remark}`));
  });
  const verdicts = new Map([[true, ["good", "adds up"]], [false, ["bad", "does not add up"]], [null, ["unknown", "not checked"]]]);
  const [level, words] = lastAt ? ["unknown", `last known ${timeText(lastAt)}`] : verdicts.get(account.adds_up);
  sum.push("   ", el("span", { class: "state", "data-level": level }, words));
  if (account.broken) sum.push("   ", el("span", { class: "state", "data-level": "bad" }, `but is ${account.broken}`));
  text.replaceChildren(...sum, ...[...account.disagreements, ...(account.away ?? [])].map((reason) => el("div", { class: "error" }, reason)));
}

function showActions(line) {
  const paused = line.paused !== null, key = JSON.stringify([line.name, paused, client.signed_in, client.read_only]);
  if ($("actions").dataset.key === key) return;
  $("actions").dataset.key = key;
  const wait = line.direction === "up" ? "Its gateway goes on receiving; messages wait on disk until you resume it." : "What is in the outbox is delivered; new records stay in Kafka until you resume it.";
  const button = (verb, words, text) => actionButton(words, () => confirmAction(`${words} ${line.name}?`, text, () => ask(`/lines/${encodeURIComponent(line.name)}/${verb}`, "POST")));
  $("actions").replaceChildren(
    paused ? button("resume", "Resume", "Its query goes on with what waits.") : button("pause", "Pause", wait),
    button("restart", "Restart", "Its gateway and its query end and start again with the present file; nothing is lost."),
  );
}

function actionButton(words, act) {
  const reason = !client.signed_in ? "needs a sign-in" : client.read_only ? "read only" : "";
  return el("button", { type: "button", disabled: Boolean(reason), title: reason || null, onclick: act }, reason ? `${words} (${reason})` : words);
}

function confirmAction(title, text, act, words = "Do it") {
  const dialog = $("dialog"), outcome = el("p", { role: "status" });
  const run = el("button", { type: "button", class: "main" }, words), leave = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  run.addEventListener("click", async () => {
    run.disabled = true;
    setText(outcome, "Asked for …");
    try {
      const result = await act();
      if (typeof result === "string") setText(outcome, result);
      else dialog.close();
      setText(leave, "Close");
      run.hidden = true;
      setTimeout(loadHistory, 2500);
    } catch (error) {
      outcome.replaceChildren(el("span", { class: "error" }, error.message));
      run.disabled = false;
    }
  });
  dialog.replaceChildren(el("h2", { id: "dialog-title" }, title), el("p", {}, text), outcome, el("div", { class: "actions" }, run, leave));
  dialog.showModal();
}

// -- charts -----------------------------------------------------------------------------------------------------------

const ranges = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"], [86400, "24 h"]];
const chartSpecs = [
  { title: "Messages a second", unit: "/s", series: [["in", "In", "--rate-in"], ["out", "Out", "--rate-out"]] },
  { title: "Waiting messages", unit: "messages", series: [["waiting", "Waiting", "--waiting-line"]] },
  { title: "Oldest message and batch", unit: "s", series: [["oldest", "Oldest", "--waiting-line"], ["batch", "Last batch", "--batch"]] },
];
const time = { seconds: 3600, held: false, zoomed: false, columns: null, faults: [], actions: [], plots: [], at: 0 };
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function loadHistory() {
  const name = shown.name;
  if (!name) return;
  try {
    const answer = await ask(`/page/history?line=${encodeURIComponent(name)}&seconds=${time.seconds}`);
    if (name !== shown.name || time.held) return;
    Object.assign(time, answer, { at: Date.now() });
  } catch { return; }
  drawCharts();
  showFaults();
}

function addSample(row, at) {
  if (!time.columns || time.held || !at) return;
  const columns = time.columns, last = columns.t.at(-1) ?? 0;
  if (at - last < 0.9) return;
  const values = { t: at, in: row.rate_in, out: row.rate_out, waiting: row.waiting, oldest: row.lag_s, batch: row.batch_s };
  for (const [name, value] of Object.entries(values)) columns[name].push(value);
  while (columns.t.length > 3000) for (const column of Object.values(columns)) column.shift();
  if (Date.now() - time.at > Math.max(6000, time.seconds * 2)) { time.at = Date.now(); loadHistory(); }
  else drawCharts();
}

function bandPlugin() {
  const paint = (plot) => {
    const { ctx } = plot, { left, top, width, height } = plot.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    for (const fault of time.faults) {
      const from = plot.valToPos(fault.start, "x", true), to = plot.valToPos(fault.end ?? Date.now() / 1000, "x", true);
      ctx.globalAlpha = 0.22;
      ctx.fillStyle = colour("--bad");
      ctx.fillRect(from, top, Math.max(to - from, 3), height);
      ctx.globalAlpha = 0.9;
      ctx.fillRect(from, top, Math.max(to - from, 3), 3);
    }
    ctx.globalAlpha = 0.9;
    ctx.fillStyle = colour("--accent");
    for (const action of time.actions) ctx.fillRect(plot.valToPos(action.t, "x", true), top, 2, height);
    ctx.restore();
  };
  const zoom = (plot) => { if (plot.select.width > 0) time.zoomed = true; };
  const reset = (plot) => plot.over.addEventListener("dblclick", () => { time.zoomed = false; drawCharts(); });
  return { hooks: { drawClear: paint, setSelect: zoom, ready: reset } };
}

function makeCharts() {
  for (const plot of time.plots) plot.destroy();
  const holder = $("charts");
  holder.replaceChildren();
  time.plots = chartSpecs.map((spec) => {
    const box = el("div", { class: "chart", role: "img", "aria-label": `${spec.title} over time` }, el("h4", {}, spec.title));
    holder.append(box);
    const format = (_, value) => (value === null || value === undefined ? "–" : valueText(value, spec.unit));
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { stroke: colour("--rule") }, font: "11px system-ui" };
    return new uPlot({
      width: box.clientWidth, height: 170, plugins: [bandPlugin()],
      cursor: { sync: { key: "charts" }, drag: { x: true, y: false } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      axes: [{ ...axis, space: 60, values: (_, ticks) => ticks.map((tick) => (ticks[1] - ticks[0] < 60 ? clock : minutes).format(new Date(tick * 1000))) }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => valueText(tick, spec.unit)) }],
      series: [
        { label: "Time", value: (_, at) => (at ? timeText(at) : "–") },
        ...spec.series.map(([, label, name]) => ({ label, stroke: colour(name), width: 1.6, points: { show: false }, value: format, spanGaps: false })),
      ],
    }, [[], ...spec.series.map(() => [])], box);
  });
}

function drawCharts() {
  if ($("line").hidden) return;
  if (!time.plots.length) makeCharts();
  const now = Date.now() / 1000, first = time.columns.t[0] ?? now;
  const range = { min: Math.max(now - time.seconds, Math.min(first, now - 120)), max: now };
  chartSpecs.forEach((spec, index) => {
    const plot = time.plots[index];
    plot.setData([time.columns.t, ...spec.series.map(([key]) => time.columns[key])], false);
    if (!time.zoomed) plot.setScale("x", range);
    else plot.redraw();
  });
}

function showFaults() {
  const text = (fault) => `${timeText(fault.start)} to ${fault.end === null ? "now" : `${timeText(fault.end)} (${durationText(Math.max(fault.end - fault.start, 0))})`}   ${fault.part}: ${fault.text}`;
  const items = [
    ...time.faults.map((fault) => [fault.start, fault.part, text(fault)]),
    ...time.actions.map((action) => [action.t, "action", `${timeText(action.t)}   ${action.action} by ${action.by}`]),
  ].sort((a, b) => b[0] - a[0]);
  $("faults").replaceChildren(...items.map(([, part, words]) => el("li", { "data-part": part }, words)));
  setText($("legend"), items.length ? "red: a fault and its recovery; blue: an action. Drag to zoom, double click to reset." : "No fault in this time. Drag to zoom, double click to reset.");
}

function makeRanges() {
  for (const [seconds, words] of ranges) {
    const button = el("button", { type: "button", "aria-pressed": String(seconds === time.seconds) }, words);
    button.addEventListener("click", () => {
      time.seconds = seconds;
      time.zoomed = false;
      setHeld(false);
      for (const other of $("ranges").children) other.setAttribute("aria-pressed", String(other === button));
      loadHistory();
    });
    $("ranges").append(button);
  }
}

function setHeld(held) {
  time.held = held;
  $("hold").setAttribute("aria-pressed", String(held));
  setText($("hold"), held ? "Let the charts run" : "Hold the charts");
  if (!held) loadHistory();
}

// -- panels: each asks a command of the command line ------------------------------------------------------------------

function panel(id, fill) {
  const details = $(id);
  details.addEventListener("toggle", () => { if (details.open && !details.dataset.filled) { details.dataset.filled = "true"; fill(details.querySelector(".panel")); } });
}

async function work(output, words, act) {
  output.replaceChildren(el("p", { role: "status" }, words));
  try {
    output.replaceChildren(...(await act()));
  } catch (error) {
    output.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
  }
}

function signInHint(box) {
  if (client.signed_in) return false;
  const hint = client.can_sign_in ? el("form", { method: "post", action: "/page/session" }, el("label", {}, "Token", el("input", { name: "token", type: "password", required: true })), el("button", {}, "Sign in")) : el("p", {}, "Payloads are shown on the page of towline ui, or with a token_file of [monitor].");
  box.append(el("p", {}, "This needs a sign-in."), hint);
  return true;
}

function dataTable(titles, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": titles.map(String).join(", ") }, el("table", {}, el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell ?? "")))))));
}

// Changes white space only: numbers and names stay as they were sent.
function indentJson(text) {
  let depth = 0, last = "";
  const line = () => `\n${"  ".repeat(depth)}`;
  return text.replace(/"(?:[^"\\]|\\.)*"|[^\s"]|\s+/g, (token) => {
    if (!token.trim()) return "";
    const closes = token === "}" || token === "]", opened = last === "{" || last === "[";
    if (closes) depth -= 1;
    const before = closes !== opened ? line() : "";
    if (token === "{" || token === "[") depth += 1;
    last = token;
    return before + token + (token === "," ? line() : token === ":" ? " " : "");
  });
}

function payloadView(payload) {
  if (payload.base64 === null) return [el("p", {}, "The record has no value.")];
  const bytes = Uint8Array.from(atob(payload.base64), (char) => char.charCodeAt(0));
  const hex = () => {
    const lines = [];
    for (let at = 0; at < Math.min(bytes.length, 65536); at += 16) {
      const part = [...bytes.slice(at, at + 16)];
      lines.push(`${at.toString(16).padStart(6, "0")}  ${part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47)}  ${part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".")).join("")}`);
    }
    return lines.join("\n");
  };
  const views = { hex };
  if (payload.is_json) views.JSON = () => indentJson(payload.text);
  if (payload.text !== null) views.text = () => payload.text;
  const output = el("pre", { tabindex: "0", "aria-label": "Payload" }), buttons = el("span", { class: "actions" });
  const show = (name) => {
    setText(output, views[name]());
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.textContent === name));
  };
  for (const name of Object.keys(views).reverse()) buttons.append(el("button", { type: "button", onclick: () => show(name) }, name));
  show(Object.keys(views).at(-1));
  const size = `${whole.format(payload.bytes)} bytes${payload.truncated ? `, the first ${whole.format(bytes.length)} of them here` : ""}`;
  return [el("div", { class: "bar" }, el("strong", {}, "Payload"), el("span", { class: "dim" }, size), buttons), output];
}

function letterView(letter) {
  const facts = [["reason", letter.reason], ["detail", letter.detail], ["line", letter.line], ["to topic", letter.topic], ["from", letter.mqtt_topic], ["at", letter.at ? timeText(letter.at / 1000) : null]].filter(([, value]) => value);
  return [dataTable(["field", "value"], facts), ...payloadView(letter.payload), ...headersView(letter.headers, "header")];
}

function headersView(headers, title) {
  if (!headers.length) return [];
  return [dataTable([title, "value"], headers.map(([name, text, base64]) => [name, text ?? (base64 === null ? "none" : `${base64} (Base64)`)]))];
}

function fillLetters(box) {
  if (signInHint(box)) return;
  const scope = el("select", {}, el("option", { value: "" }, "all lines"), ...shown.table.lines.map((row) => el("option", {}, row.name)));
  const output = el("div"), one = el("div");
  const load = () => work(output, "Reading the dead-letter topics …", async () => {
    one.replaceChildren();
    const result = await call("letters", [["line", scope.value], ["limit", "200"]]);
    const waiting = result.waiting.reduce((sum, row) => sum + row.letters, 0);
    if (!waiting) return [el("p", {}, "No dead letters wait.")];
    const marks = [];
    const rows = result.first.map((letter) => {
      const at = `${letter.dead_letter_topic}/${letter.partition}/${letter.offset}`;
      const mark = el("input", { type: "checkbox", "aria-label": `choose ${at}`, value: at });
      marks.push(mark);
      const view = el("button", { type: "button", onclick: () => work(one, "Reading it …", async () => letterView(await call("letter", [["at", at]]))) }, "Show");
      return [mark, timeText(letter.at / 1000), `${letter.partition}/${letter.offset}`, letter.line, letter.reason, letter.mqtt_topic ?? "not from MQTT", letter.topic ?? "no topic", bytesText(letter.bytes), letter.detail, view];
    });
    const chosen = () => marks.filter((mark) => mark.checked).map((mark) => ["at", mark.value]);
    const replay = (parameters, words) => replayLetters(parameters, words, load);
    return [
      dataTable(["letters", "reason", "line", "dead-letter topic"], result.waiting.map((row) => [whole.format(row.letters), row.reason, row.line, row.topic])),
      el("div", { class: "bar" }, actionButton("Replay the chosen", () => chosen().length && replay(chosen(), "the chosen letters")), actionButton("Replay all", () => replay([["line", scope.value]], scope.value ? `all letters of ${scope.value}` : "all letters of all lines"))),
      dataTable(["", "time", "position", "line", "reason", "MQTT topic", "to topic", "size", "detail", ""], rows),
    ];
  });
  scope.addEventListener("change", load);
  box.append(el("div", { class: "bar" }, el("label", {}, "Line ", scope), el("button", { type: "button", onclick: load }, "Read again")), output, one);
  load();
}

function replayText(result, would) {
  const parts = Object.entries(result.replayed).map(([topic, count]) => `${whole.format(count)} ${would}written to ${topic}`);
  if (result.filtered) parts.push(`${whole.format(result.filtered)} ${would}closed: a where filters them now`);
  parts.push(...Object.entries(result.dead).map(([reason, count]) => `${whole.format(count)} stay dead letters: ${reason}`));
  return parts.join("; ") || "no such letter waits any more";
}

async function replayLetters(parameters, words, load) {
  confirmAction(`Replay ${words}?`, "Asking what it would do …", () => null);
  const dialog = $("dialog"), [text, button] = [dialog.querySelector("p"), dialog.querySelector("button")];
  button.disabled = true;
  try {
    const plan = replayText(await call("replay", [...parameters, ["dry_run", "yes"]]), "would be ");
    if (!dialog.open) return;
    confirmAction(`Replay ${words}?`, `${plan}. Each letter is replayed at most once.`, async () => {
      const done = replayText(await call("replay", parameters), "");
      load();
      return done;
    }, "Replay");
  } catch (error) {
    text.replaceChildren(el("span", { class: "error" }, error.message));
  }
}

function fillRefused(box) {
  if (signInHint(box)) return;
  const output = el("div"), one = el("div");
  const load = () => work(output, "Asking the gateways …", async () => {
    one.replaceChildren();
    const result = await call("refused", [["limit", "200"]]);
    if (!result.kept.length) return [el("p", {}, "No broker has refused a message.")];
    const replay = (line) => confirmAction(`Send the refused messages of ${line} again?`, "They go to the end of the outbox, each once; the broker may refuse them again.", async () => {
      const done = await call("refused-replay", [["line", line]]);
      load();
      return `${whole.format(Object.values(done.replay).reduce((sum, count) => sum + count, 0))} are in the outbox again.`;
    }, "Send again");
    const rows = result.first.map((row) => [timeText(row.arrived_at / 1e6), row.line, row.words, row.topic, `QoS ${row.qos}`, bytesText(row.bytes),
      el("button", { type: "button", onclick: () => work(one, "Reading it …", async () => refusedView(await call("refused-message", [["line", row.line], ["at", row.offset]]))) }, "Show")]);
    return [
      dataTable(["messages", "reason", "line", ""], result.kept.map((row) => [whole.format(row.messages), row.words, row.line, actionButton("Send again", () => replay(row.line))])),
      dataTable(["time", "line", "reason", "topic", "", "size", ""], rows),
    ];
  });
  box.append(el("div", { class: "bar" }, el("button", { type: "button", onclick: load }, "Read again")), output, one);
  load();
}

function refusedView(message) {
  const facts = Object.entries(message).filter(([, value]) => value !== null && typeof value !== "object").map(([name, value]) => [name.replaceAll("_", " "), String(value)]);
  return [dataTable(["field", "value"], facts), ...payloadView(message.payload), ...headersView(message.properties, "property")];
}

function fillMessage(box) {
  if (signInHint(box)) return;
  const ways = [["offset", "journal offset", "4711"], ["device", "device", "d7"], ["kafka", "record in Kafka", "telemetry/0/1234"], ["receipt", "receipt", "PUBLISHER/NUMBER"]];
  const way = el("select", {}, ...ways.map(([value, words]) => el("option", { value }, words)));
  const value = el("input", { required: true, placeholder: ways[0][2], autocomplete: "off" });
  const line = el("select", {}, ...shown.table.lines.map((row) => el("option", { selected: row.name === shown.name }, row.name)));
  const output = el("div");
  way.addEventListener("change", () => { value.placeholder = ways.find(([name]) => name === way.value)[2]; });
  const find = (name, text) => work(output, "Looking in the journal, the checkpoint and Kafka …", async () => messageView(await call("message", [["line", line.value], [name, text]]), find));
  const submit = (event) => { event.preventDefault(); find(way.value, value.value.trim()); };
  box.append(el("form", { onsubmit: submit }, el("label", {}, "Line", line), el("label", {}, "By", way), el("label", {}, "Which", value), el("button", {}, "Find")), output);
}

function messageView(story, find) {
  const steps = (story.steps ?? []).map((step) => el("li", { "data-known": String(step.at !== null) }, el("strong", {}, step.name), "   ", el("span", { class: "dim" }, step.at === null ? "" : timeText(step.at)), el("div", {}, step.text)));
  const candidates = story.candidates ?? [];
  const parts = [el("ol", { class: "steps" }, ...steps)];
  if (candidates.length) parts.push(dataTable(["time", "message", "where", ""], candidates.map((row) => [row.at ? timeText(row.at) : "", row.text, row.kafka ?? `journal, offset ${row.offset}`, el("button", { type: "button", onclick: () => find(...(row.kafka ? ["kafka", row.kafka] : ["offset", String(row.offset)])) }, "Story")])));
  if (!steps.length && !candidates.length) parts.push(el("p", {}, "There is no such message."));
  return parts;
}

function fillDoctor(box) {
  if (signInHint(box)) return;
  const output = el("div");
  const run = () => work(output, "Asking the broker, Kafka and the disk; this takes a while …", async () => doctorView(await call("doctor")));
  box.append(el("p", {}, "Doctor creates only sessions, messages and files of its own, which no line receives, and removes them again."), el("div", { class: "bar" }, actionButton("Run doctor", run)), output);
}

function doctorView(report) {
  const marks = { holds: ["good", "holds"], limited: ["good", "holds up to a limit"], unknown: ["unknown", "unknown"], warns: ["warn", "in danger"], broken: ["bad", "broken"] };
  const rows = report.findings.map((row) => {
    const [level, words] = marks[row.verdict] ?? ["unknown", row.verdict];
    return [el("span", { class: "state", "data-level": level }, words), row.line, row.promise, row.limit, row.evidence, row.remedy];
  });
  const changes = changesBetween(report.previous?.findings ?? [], report.findings, Object.keys(marks));
  const since = report.previous ? [el("h3", {}, `Since ${timeText(report.previous.at)}`), el("ul", { class: "notes" }, ...(changes.length ? changes : ["nothing has changed"]).map((text) => el("li", {}, text)))] : [];
  return [...since, dataTable(["promise", "line", "of", "holds until", "because", "mend"], rows)];
}

// What differs between two reports, by check, line and promise; of several rows of one the worst counts.
function changesBetween(before, now, verdicts) {
  const worst = (findings) => {
    const rows = new Map();
    for (const row of findings) {
      const key = [row.promise || row.code, row.line].filter(Boolean).join(" of ");
      if (!rows.has(key) || verdicts.indexOf(row.verdict) > verdicts.indexOf(rows.get(key))) rows.set(key, row.verdict);
    }
    return rows;
  };
  const [old, present] = [worst(before), worst(now)];
  return [...new Set([...old.keys(), ...present.keys()])].filter((key) => old.get(key) !== present.get(key))
    .map((key) => `${key}: ${old.get(key) ?? "not asked"} → ${present.get(key) ?? "not asked"}`);
}

// -- start ------------------------------------------------------------------------------------------------------------

async function start() {
  makeHeader();
  makeRanges();
  $("filter").addEventListener("input", (event) => { shown.filter = event.target.value; showTable(shown.table); });
  $("hold").addEventListener("click", () => setHeld(!time.held));
  $("dialog").addEventListener("click", (event) => { if (event.target === $("dialog")) $("dialog").close(); });
  new ResizeObserver(() => time.plots.forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: 170 }))).observe($("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { makeCharts(); if (time.columns) drawCharts(); });
  panel("letters", fillLetters);
  panel("refused", fillRefused);
  panel("message", fillMessage);
  panel("doctor", fillDoctor);
  try {
    Object.assign(client, await ask("/page/access"));
  } catch { /* the stream says it */ }
  $("leave").hidden = !client.signed_in;
  connect();
  if (shown.name) loadHistory();
}

start();
