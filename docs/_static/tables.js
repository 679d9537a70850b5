/* On a phone, a table of words becomes one block for each row, with each cell under the name of its column (pages.css).
   Tables whose cells are mostly numbers stay tables. */
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")].map((cell) => cell.textContent.trim());
    const numbers = cells.filter((text) => /^[-+]?[\d.,]+( ?(%|x|s|ms|us|µs|[KMGT]i?B))?$/.test(text)).length;
    if (numbers > cells.length / 3) continue;
    table.classList.add("in-words");
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, column) => (cell.dataset.column = heads[column] ?? ""));
  }
});
