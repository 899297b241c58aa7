// Keeps a page up to date: takes what has changed from the server, and asks it to stop and resume.
(() => {
  "use strict";

  const at = (id) => document.getElementById(id);
  const about = JSON.parse(at("live").textContent);
  const FOCUSABLE = "a[href], button, summary, input, [tabindex]";
  const HINT = "To stop and resume runs, open the address that coterie watch printed.";
  const AGAIN = 3000; // milliseconds before a lost connection is tried again

  // --- the token: it comes behind the # of the address, which no request carries --------------

  const shared = "BroadcastChannel" in window ? new BroadcastChannel("coterie-token") : null;
  let token = null;

  function hold(found) {
    token = found;
    try {
      sessionStorage.setItem("coterie-token", found);
    } catch {
      // it lasts as long as the page, then
    }
    allow();
  }

  function findToken() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      history.replaceState(null, "", location.pathname + location.search);
      hold(given);
      return;
    }
    try {
      token = sessionStorage.getItem("coterie-token");
    } catch {
      token = null;
    }
    if (!token) shared?.postMessage({ wanted: true }); // another tab may have it
  }

  shared?.addEventListener("message", ({ data }) => {
    if (data.wanted && token) shared.postMessage({ token });
    else if (data.token && !token) {
      hold(data.token);
      if (at("welcome")) enter();
    }
  });

  const post = (address) =>
    fetch(address, { method: "POST", headers: { "X-Coterie-Token": token }, redirect: "error" });

  // --- the page that asks for the token --------------------------------------------------------

  async function enter() {
    const answer = await post("/api/login").catch(() => null);
    if (answer?.ok) location.reload();
    else at("state-hint").textContent = answer ? "That is not the token." : "Nobody answers.";
  }

  function askForToken() {
    at("enter").addEventListener("click", () => {
      hold(at("token").value.trim());
      enter();
    });
    at("token").addEventListener("keydown", (event) => {
      if (event.key === "Enter") at("enter").click();
    });
    if (token) enter();
  }

  // --- a run's state ---------------------------------------------------------------------------

  let asking = false;

  function allow() {
    for (const button of document.querySelectorAll("[data-action]")) {
      button.disabled = !token || asking;
    }
    const hint = at("state-hint");
    const offered = document.querySelector("[data-action]:not([hidden])");
    if (hint && about.api && !asking) hint.textContent = offered && !token ? HINT : "";
  }

  async function act(button) {
    asking = true;
    allow();
    at("state-hint").textContent = "Asking …";
    const answer = await post(`${about.api}/${button.dataset.action}`).catch(() => null);
    asking = false;
    allow();
    if (document.activeElement === document.body) { // a button that is disabled loses the focus
      (button.hidden ? at("state-words") : button).focus({ preventScroll: true });
    }
    if (!answer) at("state-hint").textContent = "Nobody answers: is coterie watch still running?";
    else if (!answer.ok) at("state-hint").textContent = await answer.text();
  }

  function say(id, text) {
    if (at(id).textContent !== text) at(id).textContent = text; // what is the same is not read out
  }

  function showState(state) {
    const block = at("state");
    block.dataset.status = state.status;
    const bar = block.querySelector("progress");
    bar.max = state.max;
    bar.value = state.value;
    say("state-words", state.words);
    say("state-trouble", state.trouble);
    const focused = document.activeElement;
    for (const button of block.querySelectorAll("[data-action]")) {
      button.hidden = button.dataset.action !== state.action;
    }
    if (focused?.matches("[data-action][hidden]")) at("state-words").focus({ preventScroll: true });
    allow();
  }

  // --- parts that have changed -----------------------------------------------------------------

  // What the server made the page of, rows of the list or blocks: the first news may lack some.
  let order = [...document.querySelectorAll("#rows > tr, .blocks > .block.state ~ [id]:not(script)")]
    .map((e) => e.id);
  const later = new Map(); // parts with text that the reader is selecting

  function selecting(id) {
    const selection = getSelection();
    const old = at(id);
    return old && !selection.isCollapsed && selection.rangeCount && selection.containsNode(old, true);
  }

  function exchange(id, part, after) {
    const old = at(id);
    const active = document.activeElement;
    const place = old?.contains(active) ? [...old.querySelectorAll(FOCUSABLE)].indexOf(active) : null;
    const moved = old ? [...old.querySelectorAll(".scroll, pre")].map((e) => e.scrollLeft) : [];
    if (part.row) exchangeRow(id, old, part.html, after);
    else window.coterie.replace(id, part.html, part.figure, after);
    const fresh = at(id);
    if (!fresh) return;
    [...fresh.querySelectorAll(".scroll, pre")].forEach((e, i) => { e.scrollLeft = moved[i] || 0; });
    if (place !== null && !fresh.contains(document.activeElement)) {
      fresh.querySelectorAll(FOCUSABLE)[place]?.focus({ preventScroll: true });
    }
  }

  function exchangeRow(id, old, html, after) {
    const frame = document.createElement("template");
    frame.innerHTML = html;
    const fresh = frame.content.firstElementChild;
    if (old) old.replaceWith(fresh);
    else if (at(after)?.matches("tr")) at(after).after(fresh);
    else at("rows").prepend(fresh);
  }

  function take(found) {
    for (const id of order) if (!found.order.includes(id)) at(id)?.remove();
    order = found.order;
    order.forEach((id, i) => {
      const part = found.parts[id];
      if (!part) return;
      later.delete(id);
      if (part.state) showState(part.state);
      else if (part.text !== undefined) say(id, part.text);
      else if (selecting(id)) later.set(id, part);
      else exchange(id, part, order[i - 1]);
    });
    showContents();
    showTimes();
    arrange();
  }

  // --- the list: comparisons are folded, ticked runs can be compared ----------------------------

  const unfolded = new Set();
  const ticked = new Set();

  // Runs of a comparison stand below it, in the order in which they were sorted.
  function arrange() {
    const body = at("rows");
    if (!body) return;
    for (const head of body.querySelectorAll("tr.comparison")) {
      const open = unfolded.has(head.id);
      head.querySelector(".fold").setAttribute("aria-expanded", String(open));
      let last = head;
      for (const member of [...body.querySelectorAll(`tr[data-group="${head.id}"]`)]) {
        if (last.nextElementSibling !== member) last.after(member);
        last = member;
        if (member.hidden !== !open) member.hidden = !open;
      }
    }
    for (const box of body.querySelectorAll("[data-tick]")) {
      box.checked = ticked.has(box.dataset.tick);
    }
    at("side-by-side").disabled = ticked.size < 2;
  }

  function onList(event) {
    const fold = event.target.closest?.("[data-fold]");
    if (fold) {
      if (!unfolded.delete(fold.dataset.fold)) unfolded.add(fold.dataset.fold);
      arrange();
    } else if (event.target.matches?.("[data-tick]")) {
      const { checked, dataset } = event.target;
      if (checked) ticked.add(dataset.tick);
      else ticked.delete(dataset.tick);
      arrange();
    } else if (event.target.closest?.(".runs .sort")) {
      arrange();
    } else if (event.target.id === "side-by-side") {
      location.href = `/compare?${new URLSearchParams([...ticked].map((name) => ["run", name]))}`;
    }
  }

  // Sections appear as a run gets something to show in them.
  function showContents() {
    const list = document.querySelector(".contents ul");
    const heads = [...document.querySelectorAll(".blocks > .section[id]")];
    const listed = list ? [...list.querySelectorAll("a")].map((a) => a.hash.slice(1)) : null;
    if (!listed || heads.map((h) => h.id).join() === listed.join()) return;
    list.replaceChildren(...heads.map((head) => {
      const [item, link] = ["li", "a"].map((name) => document.createElement(name));
      item.className = `level-${head.tagName.slice(1) - 1}`;
      link.href = `#${head.id}`;
      link.textContent = head.textContent;
      item.append(link);
      return item;
    }));
  }

  document.addEventListener("selectionchange", () => {
    for (const [id, part] of later) {
      if (selecting(id)) continue;
      later.delete(id);
      if (order.includes(id)) exchange(id, part, order[order.indexOf(id) - 1]);
    }
  });

  // --- the connection: none while nobody looks, for a browser allows only a few ----------------

  let source = null;
  let version = about.since;
  let timer = 0;

  function connect() {
    clearTimeout(timer);
    if (source || document.hidden) return;
    source = new EventSource(`${about.events}?since=${encodeURIComponent(version)}`);
    source.addEventListener("open", () => { at("connection").textContent = ""; });
    source.addEventListener("parts", (event) => {
      version = event.lastEventId;
      take(JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      at("connection").textContent = "not connected";
      if (source?.readyState !== EventSource.CLOSED) return; // it tries again by itself
      disconnect();
      timer = setTimeout(connect, AGAIN);
    });
  }

  function disconnect() {
    source?.close();
    source = null;
  }

  // --- times -----------------------------------------------------------------------------------

  function ago(seconds) {
    for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= unit) return `${Math.floor(seconds / unit)} ${name} ago`;
    }
    return seconds < 5 ? "just now" : `${Math.floor(seconds / 5) * 5} s ago`;
  }

  function showTimes() {
    for (const time of document.querySelectorAll("time[datetime]")) {
      const moment = new Date(time.dateTime);
      const text = ago((Date.now() - moment) / 1000);
      if (time.textContent !== text) time.textContent = text;
      time.title = moment.toLocaleString();
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-action]");
    if (button && !asking) act(button);
    onList(event);
  });
  findToken();
  if (at("welcome")) {
    askForToken();
    return;
  }
  allow();
  showTimes();
  arrange();
  if (!about.events) return; // runs side by side, as they were
  setInterval(showTimes, 5000);
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", connect);
  connect();
})();
