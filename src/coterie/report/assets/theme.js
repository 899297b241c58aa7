// Before anything is shown: the theme that was chosen here last, else the system's.
(() => {
  "use strict";
  let chosen = null;
  try {
    chosen = localStorage.getItem("coterie-theme");
  } catch {
    // a page from a file may not be allowed to remember
  }
  if (chosen === "dark" || chosen === "light") {
    document.documentElement.dataset.theme = chosen;
  }
  document.documentElement.classList.add("scripted");
})();
