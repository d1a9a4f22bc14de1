"use strict";

const DASH = /^[-\u2013\u2014]?$/;
const NUMBER = /^[<>]?\s*([-+\u2212]?(?:\d[\d,]*)?\.?\d+(?:e[-+]?\d+)?)(?=$|[\s%\u00b1])/i;
const MIN_FILTERED_ROWS = 11;

// The number at the start of a cell, such as the mean of "71.67 ± 0.50"; null without one.
function parseNumber(text) {
  const match = NUMBER.exec(text.trim());
  return match && Number(match[1].replaceAll(",", "").replace("\u2212", "-"));
}

// The positions of the cells in sorted order: numbers by value, other texts by the alphabet, dashes last.
function sortedOrder(texts, direction) {
  const cells = texts.map((text) => text.trim());
  const numbers = cells.map(parseNumber);
  const isDash = cells.map((text) => Number(DASH.test(text)));
  const areNumbers = cells.every((_, index) => isDash[index] || numbers[index] !== null);
  const compare = areNumbers
    ? (a, b) => numbers[a] - numbers[b]
    : (a, b) => cells[a].localeCompare(cells[b], "en", { numeric: true });
  const order = cells.map((_, index) => index);
  return order.sort((a, b) => isDash[a] - isDash[b] || (isDash[a] ? 0 : direction * compare(a, b)) || a - b);
}

function hasAllWords(text, filter) {
  return filter.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
}

function create(tag, attributes, ...children) {
  const element = document.createElement(tag);
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  element.append(...children);
  return element;
}

function makeSortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  const groups = [...table.tBodies].map((body) => ({ body, rows: [...body.rows].filter((row) => !row.matches(".group")) }));
  headers.forEach((header, column) => {
    const button = create("button", { type: "button" }, ...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const state = { ascending: "descending", descending: null }[header.ariaSort];
      const sort = state === undefined ? "ascending" : state;
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      if (sort) header.setAttribute("aria-sort", sort);
      table.classList.toggle("sorted", Boolean(sort));
      for (const { body, rows } of groups) {
        const texts = rows.map((row) => row.cells[column].textContent);
        const order = sort ? sortedOrder(texts, sort === "ascending" ? 1 : -1) : rows.keys();
        body.append(...[...order].map((index) => rows[index]));
      }
    });
  });
}

function makeFilterable(table) {
  const rows = [...table.querySelectorAll("tbody tr:not(.group)")];
  if (rows.length < MIN_FILTERED_ROWS) return;
  const input = create("input", { type: "search" });
  const count = create("output", {});
  table.parentElement.before(create("p", { class: "filter" }, create("label", {}, "Filter rows: ", input), " ", count));
  input.addEventListener("input", () => {
    rows.forEach((row) => {
      const group = row.parentElement.querySelector(".group");
      row.hidden = !hasAllWords(`${group ? group.textContent : ""} ${row.textContent}`, input.value);
    });
    for (const body of table.tBodies) body.hidden = [...body.rows].every((row) => row.hidden || row.matches(".group"));
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : "";
  });
}

if (typeof document === "undefined") {
  module.exports = { parseNumber, sortedOrder, hasAllWords };
} else {
  document.querySelectorAll("main .scroll table").forEach((table) => { makeSortable(table); makeFilterable(table); });
  if (matchMedia("(max-width: 60rem)").matches) document.querySelector("nav details").open = false;
}
