// The order of search results: the name of a method that was typed, pages with the words in their title, other guides, and then the
// interface, whose pages have most words.
const WORDS = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);

var Scorer = {
  score: function (result) {
    const [page, title, , , score] = result;
    if (page.endsWith("/accel_torch") && WORDS.length === 1 && title.toLowerCase().endsWith("." + WORDS[0])) return score + 45;
    const named = WORDS.every((word) => title.toLowerCase().includes(word)) ? 50 : 0;
    if (page.startsWith("how-to/") || page.startsWith("tutorials/")) return score + named + 20;
    return page.startsWith("reference/generated/") ? score - 10 : score + named;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
