// What the theme leaves out for those who use a keyboard or a screen reader.
const mend = () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  // the place of a copy button is no part of the page to go to
  // nor is a part of the table of contents, of which several may have one name
  for (const nav of document.querySelectorAll(":is(.md-code__nav, .md-nav--secondary .md-nav):not([role])")) {
    nav.setAttribute("role", "none");
    nav.removeAttribute("aria-label");
  }
  for (const code of document.querySelectorAll("pre > code")) {
    if (code.scrollWidth > code.clientWidth || code.scrollHeight > code.clientHeight) code.tabIndex = 0;
  }
};
mend();
addEventListener("resize", mend);
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true }); // buttons come later
