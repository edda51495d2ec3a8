// Switches between the system's theme, light and dark. The choice lasts as long as the tab.

import { byId } from "./dom.js";

const THEMES = ["system", "light", "dark"];
const NAME = "tokenloom-theme";

const apply = (theme) => {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
};

export const startTheme = () => {
  let theme = sessionStorage.getItem(NAME) ?? "system";
  apply(theme);
  byId("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    sessionStorage.setItem(NAME, theme);
    apply(theme);
  });
};
