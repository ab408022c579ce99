// Which pages a search shows first: the chapters, then what is there to look things up, then the API reference.
var Scorer = {
    score: ([page, , , , score]) => score - (page.includes("_pages/tplab") ? 100 : 0),
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
