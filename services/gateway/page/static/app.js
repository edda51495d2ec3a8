// Starts the parts of the page.

import { startKeys } from "./keys.js";
import { startMesh } from "./mesh/mesh.js";
import { startPlayground } from "./playground/playground.js";
import { startRequests } from "./traffic/requests.js";
import { startTheme } from "./theme.js";
import { startTraffic } from "./traffic/traffic.js";

startTheme();
startKeys();
const playground = startPlayground();
startMesh((model) => {
  playground.model = model;
});
startTraffic();
startRequests();
