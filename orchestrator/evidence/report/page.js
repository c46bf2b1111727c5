"use strict";

// The theme: as the system has it, until the reader chooses; the choice is kept where that is allowed.
const root = document.documentElement;
const toggle = document.getElementById("theme");
const system = window.matchMedia("(prefers-color-scheme: dark)");

function remembered() {
  try { return localStorage.getItem("isthmus-theme"); } catch { return null; }
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
}

function showTheme() {
  toggle.textContent = isDark() ? "Light" : "Dark";
  toggle.setAttribute("aria-label", isDark() ? "Use the light theme" : "Use the dark theme");
}

const kept = remembered();
if (kept === "dark" || kept === "light") root.dataset.theme = kept;
toggle.hidden = false;
toggle.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("isthmus-theme", root.dataset.theme); } catch { /* a file may keep nothing */ }
  showTheme();
});
system.addEventListener("change", showTheme);
showTheme();

// Each timeline shows one step; the buttons and the list choose it. Without scripts all are shown.
for (const chooser of document.querySelectorAll("[data-steps]")) {
  const list = chooser.querySelector("select");
  const panels = [...chooser.querySelectorAll("[data-step]")];
  const [before, after] = chooser.querySelectorAll("button");
  const show = () => {
    panels.forEach((panel, index) => { panel.hidden = index !== list.selectedIndex; });
    before.disabled = list.selectedIndex === 0;
    after.disabled = list.selectedIndex === panels.length - 1;
  };
  const move = (by) => { list.selectedIndex += by; show(); };
  chooser.querySelector(".steps").hidden = false;
  list.addEventListener("change", show);
  before.addEventListener("click", () => move(-1));
  after.addEventListener("click", () => move(1));
  show();
}
