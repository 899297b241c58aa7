// Renders the formulas of a page with the KaTeX beside this file (MIT licence, see LICENSE).
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".formula")) {
    katex.render(place.textContent, place, { displayMode: true, throwOnError: false });
  }
});
