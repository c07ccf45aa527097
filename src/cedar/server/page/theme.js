// Runs before the first paint, so that a chosen theme never flashes in the other one.
(() => {
  try {
    const theme = localStorage.getItem("cedar.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be switched off; the system's theme is used then.
  }
})();
