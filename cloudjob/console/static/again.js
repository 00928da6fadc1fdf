// Loads the page again if one of its files did not arrive, as when the network changed: the browser
// does not, and the page would stay empty. Each time in a row it waits longer.
(() => {
  const [FIRST_MS, MOST_MS, QUIET_MS] = [500, 30_000, 60_000];
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  let isMissing = false;
  const again = async () => {
    if (isMissing) return;
    isMissing = true;
    const wait = Number(sessionStorage.again) || FIRST_MS;
    sessionStorage.again = Math.min(MOST_MS, 2 * wait);
    do await pause(wait);
    while (!(await fetch("/static/icon.svg").catch(() => null)));
    location.reload();
  };
  // Of a script's own errors, the target is the window.
  addEventListener("error", ({ target }) => target !== window && target.matches("script, link") && again(), true);
  // What browsers say of a module or a request that failed; NiceGUI only logs it.
  const judge = (error) => /fetch|module|Load failed/.test(error?.message) && again();
  addEventListener("unhandledrejection", ({ reason }) => judge(reason));
  const { error } = console;
  console.error = (...values) => {
    error(...values);
    values.forEach(judge);
  };
  // To read a style sheet that did not arrive is an error; so is that of an extension of the browser.
  const isOurs = ({ href }) => !href || new URL(href).origin === location.origin;
  const read = ({ cssRules }) =>
    [...cssRules].filter((rule) => rule instanceof CSSImportRule).forEach((rule) => read(rule.styleSheet));
  addEventListener("load", () => {
    try {
      [...document.styleSheets].filter(isOurs).forEach(read);
    } catch {
      again();
    }
  });
  setTimeout(() => isMissing || delete sessionStorage.again, QUIET_MS);
})();
