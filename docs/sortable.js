// Long tables are sorted by a click on the head of a column, first upwards, then downwards.

const LONG = 30;

function valueOf(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text);
  // What could not be measured comes last, words are in alphabetical order.
  return text === "-" || text === "" ? [2, ""] : Number.isNaN(number) ? [1, text] : [0, number];
}

function sortBy(table, column, upwards) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, column) }));
  rows.sort((a, b) => {
    const [kind, value] = a.value;
    const [otherKind, other] = b.value;
    if (kind !== otherKind) return kind - otherKind;
    const order = value < other ? -1 : value > other ? 1 : 0;
    return upwards ? order : -order;
  });
  body.append(...rows.map(({ row }) => row));
}

for (const table of document.querySelectorAll("article table")) {
  if (table.tHead === null || table.tBodies[0].rows.length < LONG) continue;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const sort = () => {
      const upwards = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      sortBy(table, column, upwards);
    };
    head.tabIndex = 0;
    head.style.cursor = "pointer";
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter") sort();
    });
  });
}
