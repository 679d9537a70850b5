/* Above the results of the search: the messages and settings that match (first-results.js lists all of them). */
const MOST = 6;

/* The words of a text; "…" stands for what a message fills in. */
const wordsOf = (text) => text.toLowerCase().match(/…|[\p{L}\p{N}_]+/gu) ?? [];

/* How many words of a message a text begins with, in their order; 0 if it does not. */
function shared(message, typed) {
  if (!message.length || !typed.length) return 0.5;
  if (message[0] === "…") {
    for (let skipped = 0; skipped <= typed.length; skipped++) {
      const rest = shared(message.slice(1), typed.slice(skipped));
      if (rest) return rest;
    }
    return 0;
  }
  const [first, last] = [message[0], typed.length === 1];
  const equal = first === typed[0] || (last && first.startsWith(typed[0]));
  const rest = equal ? shared(message.slice(1), typed.slice(1)) : 0;
  return rest ? rest + 1 : 0;
}

/* 3 for the name itself, 1 for a part of it, else 0; dashes and underscores are alike. */
function namesSetting(names, typed) {
  const plain = (name) => name.toLowerCase().replace(/^-+/, "").replace(/\(.*/, "").replaceAll("-", "_");
  const wanted = plain(typed.trim().split("=")[0]);
  if (wanted.length < 3 || /\s/.test(wanted)) return 0;
  return names.some((name) => plain(name) === wanted) ? 3 : names.some((name) => plain(name).includes(wanted)) ? 1 : 0;
}

function ranked(query) {
  const typed = wordsOf(query.replace(/^[\w.]+(Error|Exception|Warning)?:\s/, ""));
  const rank = (one) => {
    if (one.kind === "setting") return namesSetting(one.names, query);
    const count = shared(wordsOf(one.text), typed);
    return count >= 2 ? count : 0;
  };
  return FIRST_RESULTS.map((one) => [rank(one), one])
    .filter(([value]) => value > 0)
    .sort((a, b) => b[0] - a[0])
    .slice(0, MOST)
    .map(([, one]) => one);
}

document.addEventListener("DOMContentLoaded", () => {
  const found = ranked(new URLSearchParams(window.location.search).get("q") ?? "");
  if (!found.length) return;
  const list = document.createElement("ul");
  list.className = "first-results";
  for (const one of found) {
    const [item, link] = [document.createElement("li"), document.createElement("a")];
    link.href = one.address;
    link.textContent = one.text;
    item.append(`${one.kind} `, link, one.about ? ` ${one.about}` : "");
    list.append(item);
  }
  document.getElementById("search-results").before(list);
});
