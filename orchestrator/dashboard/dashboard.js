"use strict";

// Asks for the page's parts again, and replaces those that have changed. Losing the server changes
// nothing on the page but one line that says so; it goes on by itself once the server is back.
const shownMain = document.querySelector("main[data-live]");
const connection = document.getElementById("connection");
const ACTIVE_MS = 1000;
const LONGEST_MS = 5000;
const ENDED_MS = 10000; // an ended run stays as it is
const ANSWER_MS = 10000;
let tag = shownMain.dataset.tag;
let pauseMs = ACTIVE_MS;
let hasEnded = false;

function say(words, isLost) {
  if (connection.textContent !== words) connection.textContent = words;
  connection.classList.toggle("lost", isLost);
}

function isSelected(part) {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && selection.containsNode(part, true);
}

// Keeps what the reader has unfolded, scrolled sideways and put the focus on.
function replace(part, html) {
  const opened = [...part.querySelectorAll("details")].map((each) => each.open);
  const scrolled = [...part.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  const focusable = () => [...part.querySelectorAll("a, button, summary, .scroll")];
  const focused = focusable().indexOf(document.activeElement);
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((each, at) => { each.open = opened[at] || false; });
  part.querySelectorAll(".scroll").forEach((each, at) => { each.scrollLeft = scrolled[at] || 0; });
  if (focused >= 0) focusable()[focused]?.focus({ preventScroll: true });
}

// Asks before anything is done, and says where that was refused; what becomes of it stands on the page.
const dialog = document.getElementById("confirm");
function ask(title, words, yes) {
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-words").textContent = words;
  document.getElementById("confirm-no").textContent = yes ? "Leave it running" : "Close";
  document.getElementById("confirm-yes").textContent = yes;
  document.getElementById("confirm-yes").hidden = !yes;
  dialog.returnValue = "";
  dialog.showModal();
}

if (dialog) {
  let address = "";
  shownMain.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    if (!button) return;
    address = button.dataset.action;
    ask(button.dataset.title, button.dataset.words, button.textContent.replace("…", ""));
  });
  dialog.addEventListener("close", () => { if (dialog.returnValue === "yes") act(address); });
}

async function act(address) {
  try {
    const answer = await fetch(address, {
      method: "POST",
      headers: { "X-Isthmus-Action": shownMain.dataset.actionToken },
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 200));
    await refresh();
  } catch (error) {
    ask("Not done", error.message, "");
  }
}

const before = {};
async function refresh() {
  const answer = await fetch(shownMain.dataset.live, {
    headers: { "If-None-Match": tag }, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS),
  });
  if (answer.headers.has("X-Now")) aheadS = answer.headers.get("X-Now") - Date.now() / 1000;
  if (answer.status === 401) { say("Open the address that isthmus dashboard printed last", true); return; }
  if (answer.status === 404) { say("This run was removed", true); return; }
  if (!answer.ok && answer.status !== 304) throw new Error(answer.status);
  if (answer.status !== 304) show(await answer.json(), answer.headers.get("ETag"));
  hasEnded = answer.headers.has("X-Run-Ended");
  say(hasEnded ? "ended" : "live", false);
}

function show({ title, icon, parts }, newTag) {
  document.title = title;
  const link = document.querySelector("link[rel=icon]");
  if (link.href !== icon) link.href = icon;
  let isWhole = true;
  for (const [name, html] of Object.entries(parts)) {
    const part = document.getElementById(`part-${name}`);
    if (!part || before[name] === html) continue;
    if (isSelected(part)) { isWhole = false; continue; }
    replace(part, html);
    before[name] = html;
  }
  if (isWhole) tag = newTag;
  showAges();
}

// How long ago something was, by the server's clock, which may not be this machine's.
let aheadS = 0;
function inWords(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

function showAges() {
  for (const each of document.querySelectorAll(".age")) {
    const seconds = Math.max(0, Date.now() / 1000 + aheadS - each.dataset.since);
    const words = each.closest("dd") ? `${inWords(seconds)} ago` : ` (${inWords(seconds)} ago)`;
    if (each.textContent !== words) each.textContent = words;
  }
}
setInterval(showAges, ACTIVE_MS);

async function keepUp() {
  for (;;) {
    if (!document.hidden) {
      try {
        await refresh();
        pauseMs = hasEnded ? ENDED_MS : ACTIVE_MS;
      } catch {
        if (!hasEnded) say("No answer from the dashboard: trying again", true);
        pauseMs = Math.min(LONGEST_MS, pauseMs * 1.5);
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, pauseMs); });
  }
}

keepUp();
