// Starts the parts of the page.

import { startKeys } from "./keys.js";
import { startMesh } from "./mesh/mesh.js";
import { startModels } from "./model.js";
import { startPlayground } from "./playground/playground.js";
import { startRequests } from "./traffic/requests.js";
import { startTheme } from "./theme.js";
import { startTraffic } from "./traffic/traffic.js";

startTheme();
startKeys();
startModels();
startPlayground();
startMesh();
startTraffic();
startRequests();
