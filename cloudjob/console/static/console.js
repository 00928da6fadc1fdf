// What runs in the browser: cells and filters of the jobs table, the log table, keys.
const console_ui = (() => {
  const pad = (n) => String(n).padStart(2, "0");
  const span = (s) => {
    if (s == null || s < 0 || Number.isNaN(s)) return "";
    if (s < 10) return `${(Math.floor(10 * s) / 10).toFixed(1)} s`;
    if (s < 60) return `${Math.floor(s)} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${pad(Math.floor(s % 60))} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
    return `${Math.floor(s / 86400)} d ${pad(Math.floor((s % 86400) / 3600))} h`;
  };
  const short = (s) => {
    if (s < 60) return `${Math.max(0, Math.floor(s))} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    if (s < 86400) return `${Math.floor(s / 3600)} h`;
    return `${Math.floor(s / 86400)} d`;
  };
  // A tooltip of a chart is HTML.
  const safe = (text) => String(text).replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);
  const now = () => Date.now() / 1000;
  // As all views show a time: 2026-11-27 14:05:09 +08:00. Later than the year 9999 is none.
  const local = (s) => {
    if (!(s > 0 && s < 253402300800)) return "";
    const minutes = -new Date(s * 1000).getTimezoneOffset();
    const there = new Date((s + 60 * minutes) * 1000).toISOString();
    const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60];
    const zone = minutes ? `${minutes < 0 ? "-" : "+"}${pad(hours)}:${pad(rest)}` : "UTC";
    return `${there.slice(0, 10)} ${there.slice(11, 19)} ${zone}`;
  };

  // -- jobs ------------------------------------------------------------------------------------
  let states = "all";
  let grid = null;

  const duration = ({ data }) =>
    data.started ? (data.ended || (data.is_final ? data.started : now())) - data.started : null;

  const state = ({ value }) => {
    const mark = document.createElement("span");
    mark.className = `state-mark state-${value}`;
    mark.textContent = value;
    return mark;
  };

  const openJob = (event) => {
    if (event.event?.key && event.event.key !== "Enter") return;
    const id = event.column?.getColId();
    if (id?.startsWith("ag-Grid-Selection")) return;
    const { job, sweep } = event.data;
    const path = id === "sweep" && sweep ? `/sweep/${encodeURIComponent(sweep)}` : `/job/${encodeURIComponent(job)}`;
    if (event.event?.ctrlKey || event.event?.metaKey) window.open(path, "_blank");
    else window.location = path;
  };

  const remember = (name, value) => {
    const url = new URL(window.location);
    if (value && value !== "all") url.searchParams.set(name, value);
    else url.searchParams.delete(name);
    history.replaceState(history.state, "", url);
  };

  const sweep = ({ value }) => {
    const mark = document.createElement("span");
    mark.textContent = value;
    if (value) mark.className = "nicegui-link";
    return mark;
  };

  // -- groups, and columns on request: results of jobs arrive in the background
  let group = "";
  let columns = [];
  const results = {};
  const RESULTS = 20, AGAIN_S = 15, METRICS = 12;

  // Rows of a group stay together, and groups are in the order of their first rows.
  const grouped = ({ nodes }) => {
    if (!group) return;
    const groups = new Map();
    for (const node of nodes) {
      const key = node.data[group];
      groups.set(key, [...(groups.get(key) || []), node]);
    }
    nodes.splice(0, nodes.length, ...[...groups.values()].flat());
  };
  const startsGroup = ({ api, data, rowIndex }) => {
    if (!group || !rowIndex) return false;
    return api.getDisplayedRowAtIndex(rowIndex - 1)?.data[group] !== data[group];
  };

  const result = ({ data, colDef }) => results[data.job]?.[colDef.field] ?? "";
  // What is no number stays last.
  const byNumber = (first, second, firstNode, secondNode, isDescending) => {
    const [x, y] = [first, second].map((value) => ({ inf: Infinity, "-inf": -Infinity })[value] ?? value ?? NaN);
    const noNumbers = isNaN(x) - isNaN(y);
    return noNumbers ? (isDescending ? -noNumbers : noNumbers) : (x > y) - (x < y);
  };
  const metricColumn = (name) => ({
    colId: `metric ${name}`,
    headerName: name,
    width: 110,
    type: "numericColumn",
    comparator: byNumber,
    // A job may call a metric "constructor".
    valueGetter: ({ data }) => new Map(Object.entries(results[data.job]?.metrics ?? {})).get(name) ?? null,
    valueFormatter: ({ value }) => (typeof value === "number" ? number(value) : value ?? ""),
  });

  // Reads what is missing of the first rows, some at a time.
  let isReading = false;
  const readResults = async () => {
    const needs = columns.filter((name) => name !== "user");
    if (!grid || !needs.length || document.hidden || isReading) return;
    const metrics = columns.includes("metrics");
    const jobs = [];
    const last = Math.min(grid.getDisplayedRowCount(), 10 * RESULTS);
    for (let place = 0; place < last && jobs.length < RESULTS; place++) {
      const { data } = grid.getDisplayedRowAtIndex(place);
      const known = results[data.job];
      const isOld = known && !known.is_final && now() - known.at > AGAIN_S;
      if (!known || (metrics && !known.with_metrics) || (metrics && isOld)) jobs.push(data.job);
    }
    if (!jobs.length) return;
    isReading = true;
    const path = `/api/results?${new URLSearchParams({ jobs: jobs.join(), metrics })}`;
    const found = await fetch(path).then((answer) => answer.json()).catch(() => null);
    isReading = false;
    // The next refresh says why the console does not answer.
    if (!found?.jobs) return;
    // Jobs for which there was no time are asked for again.
    for (const [job, each] of Object.entries(found.jobs)) {
      results[job] = { ...each, at: now(), with_metrics: metrics };
    }
    defineColumns();
    grid.refreshCells({ force: true });
    setTimeout(readResults, 0);
  };

  const defineColumns = () => {
    const names = [...new Set(Object.values(results).flatMap((each) => Object.keys(each.metrics)))].slice(0, METRICS);
    const wanted = columns.includes("metrics") ? names : [];
    const current = grid.getColumnDefs();
    const others = current.filter(({ colId }) => !colId.startsWith("metric "));
    if (current.length === others.length + wanted.length) return;
    const place = 1 + others.findIndex(({ colId }) => colId === "values");
    others.splice(place, 0, ...wanted.map(metricColumn));
    grid.setGridOption("columnDefs", others);
  };

  const showColumns = (names) => {
    columns = names;
    remember("columns", names.join());
    narrow(grid);
    defineColumns();
    readResults();
  };

  const groupBy = (name) => {
    group = name;
    remember("group", name);
    narrow(grid);
    grid.refreshClientSideRowModel("sort");
    grid.redrawRows();
  };

  // The number of jobs beside each state of the filter.
  const count = () => {
    const counts = { all: 0 };
    grid.forEachNode(({ data }) => {
      counts.all += 1;
      counts[data.state] = (counts[data.state] || 0) + 1;
    });
    document.querySelectorAll(".states .q-btn").forEach((button) => {
      const label = button.querySelector(".block");
      if (counts[label?.textContent]) label.dataset.count = counts[label.textContent].toLocaleString();
      else delete label?.dataset.count;
    });
  };

  const narrow = (api) => {
    const width = window.innerWidth;
    for (const name of ["values", "labels", "user"]) api.setColumnsVisible([name], columns.includes(name) || group === name);
    api.setColumnsVisible(["sweep", "backend", "nodes", "exit_code"], width >= 900);
    api.setColumnsVisible(["ranks", "created", "started", "reason"], width >= 640);
  };

  const jobs = async (api, chosen) => {
    grid = api;
    ({ state: states, group, columns } = chosen);
    const [, colId, sort] = /^(\w+)-(asc|desc)$/.exec(chosen.sort) || [];
    if (colId) api.applyColumnState({ state: [{ colId, sort }], defaultState: { sort: null } });
    api.addEventListener("sortChanged", () => {
      const by = api.getColumnState().find((each) => each.sort);
      remember("sort", by ? `${by.colId}-${by.sort}` : "");
      api.redrawRows();
    });
    api.setGridOption("loading", true);
    narrow(api);
    window.addEventListener("resize", () => narrow(api));
    api.onFilterChanged();
    let version = 0;
    const error = (text) => {
      const place = document.getElementById("list-error");
      if (place) place.textContent = text;
    };
    const request = async (query) => {
      const answer = await fetch(`/api/jobs?${query}`);
      if (answer.status === 401) throw new Error("the console was restarted; open its new link");
      return answer.json();
    };
    const refresh = async () => {
      if (document.hidden && version) return;
      try {
        const found = await request(`since=${version}`);
        if (!version || found.version < version) {
          api.setGridOption("rowData", found.rows);
        } else if (found.rows.length || found.removed.length) {
          const known = (row) => api.getRowNode(row.job);
          api.applyTransaction({
            add: found.rows.filter((row) => !known(row)),
            update: found.rows.filter(known),
            remove: found.removed.filter((job) => api.getRowNode(job)).map((job) => ({ job })),
          });
        }
        version = found.version;
        error(found.error);
        count();
        readResults();
      } catch (failure) {
        error(failure instanceof TypeError ? "the console has stopped" : failure.message);
      }
    };
    // What fits on the screen comes first.
    const first = await request("since=0&limit=200").catch(() => ({ rows: [] }));
    api.setGridOption("rowData", first.rows);
    api.setGridOption("loading", false);
    await refresh();
    setInterval(refresh, 2000);
    setInterval(() => {
      if (!document.hidden) api.refreshCells({ columns: ["created", "started"] });
    }, 1000);
  };

  // -- outputs ---------------------------------------------------------------------------------
  const file = ({ value, data }) => {
    const link = document.createElement("a");
    link.textContent = value;
    if (!data.link) return link;
    link.href = data.link;
    if (data.link.startsWith("/api/")) link.download = "";
    return link;
  };

  const previewButton = ({ data }) => {
    if (data.place === undefined) return document.createElement("span");
    const button = document.createElement("button");
    button.className = "cell-button";
    button.textContent = "Preview";
    button.setAttribute("aria-label", `Preview ${data.name}`);
    button.addEventListener("click", () => emitEvent("output-preview", data.place));
    return button;
  };

  const narrowEmulator = (api) => api.setColumnsVisible(["nodes", "user", "created"], window.innerWidth >= 640);
  const outputs = (api) => api.setColumnsVisible(["modified"], window.innerWidth >= 640);

  // -- log -------------------------------------------------------------------------------------
  const logs = {};

  // A table that asks for the lines it shows.
  const log = (api, job, query, jumps, line) => {
    const view = { api, query, jumps, wanted: line, follows: !jumps && !line, count: -1, line: 0, match: "", lacks: false, asked: 0, isOld: false };
    logs[job] = view;
    api.setColumnsVisible(["line", "at", "node"], window.innerWidth >= 640);
    const path = `/api/jobs/${encodeURIComponent(job)}/log`;
    view.request = async (place, more) => {
      const answer = await fetch(`${path}${place}?${new URLSearchParams({ ...more, ...view.query })}`);
      return answer.json();
    };
    const shown = (found) => {
      const place = document.getElementById("log-state");
      if (!place) return;
      const some = found.selected === found.total ? "" : ` of ${found.total.toLocaleString()}`;
      const search = found.searched < found.total ? "searching" : "";
      const news = found.error || search || (found.is_complete ? "" : found.is_live ? "live" : "loading");
      const matches = view.match || (view.query.others && found.matches !== null ? `${found.matches.toLocaleString()} match${found.matches === 1 ? "" : "es"} in ` : "");
      const open = found.unfinished ? `, ${found.unfinished} unfinished` : "";
      const end = news && ` · ${news}`;
      place.textContent = `${matches}${found.selected.toLocaleString()}${some} lines${open}${end}`;
      api.setGridOption("pinnedBottomRowData", found.unfinished_rows);
    };
    const source = {
      getRows: async ({ startRow, endRow, successCallback, failCallback }) => {
        view.asked += 1;
        try {
          const found = await view.request("", { start: startRow, end: endRow });
          shown(found);
          successCallback(found.rows, found.selected);
        } catch {
          view.lacks = true;
          failCallback();
        } finally {
          view.asked -= 1;
        }
      },
    };
    view.toEnd = () => view.count > 0 && api.ensureIndexVisible(view.count - 1, "bottom");
    view.url = () => `${path}.txt?${new URLSearchParams(view.query)}`;
    view.show = ({ row, line }, isFailure) => {
      if (!line) return;
      if (row >= api.getDisplayedRowCount()) {
        // The table does not have the line yet.
        view.wanted = line;
        return;
      }
      view.wanted = 0;
      view.failed = isFailure ? line : view.failed;
      view.follows = false;
      view.line = line;
      api.ensureIndexVisible(row, "middle");
      api.redrawRows();
      remember("line", line);
    };
    view.toFailure = async () => view.show(await view.request("/failure"), true);
    view.toLine = async (line) => view.show(await view.request("/line", { line }));
    view.toMatch = async (forward) => {
      if (!view.query.text) return;
      const found = await view.request("/match", { line: view.line, forward });
      view.show(found);
      view.match = found.line ? `match ${found.place.toLocaleString()} of ${found.total.toLocaleString()} · ` : "";
      await look();
    };
    const look = async () => {
      const found = await view.request("", { start: 0, end: 0 }).catch(() => null);
      if (!found) return;
      shown(found);
      // The table does not ask again for lines that did not arrive.
      if (view.lacks) api.purgeInfiniteCache();
      view.lacks = false;
      const isNew = found.selected !== view.count;
      view.isOld ||= isNew && view.count >= 0;
      // A refresh drops the answers under way: a slow console would never show a line.
      if (view.isOld && !view.asked) {
        view.isOld = false;
        api.refreshInfiniteCache();
      }
      if (isNew) {
        view.count = found.selected;
        api.setRowCount(found.selected, true);
        if (view.follows) setTimeout(view.toEnd, 0);
      }
      if (view.jumps && found.is_complete) {
        view.jumps = false;
        setTimeout(view.toFailure, 0);
      }
      const isRead = found.total >= view.wanted || found.is_complete;
      if (view.wanted && isRead && found.searched >= found.total) {
        const { wanted } = view;
        view.wanted = 0;
        setTimeout(() => view.toLine(wanted), 0);
      }
      return found.searched < found.total;
    };
    let timer = 0;
    const watch = async () => {
      clearTimeout(timer);
      if (api.isDestroyed()) return;
      const isSearching = !document.hidden && (await look());
      clearTimeout(timer);
      timer = setTimeout(watch, isSearching ? 100 : 1000);
    };
    view.reload = () => {
      view.count = -1;
      api.setGridOption("datasource", { ...source });
      watch();
    };
    view.reload();
    api.addEventListener("bodyScroll", ({ direction }) => {
      if (direction !== "vertical") return;
      view.follows = api.getLastDisplayedRowIndex() >= view.count - 2;
    });
  };

  const select = (job, query) => {
    const view = logs[job];
    if (!view) return;
    view.query = query;
    view.match = "";
    // The chosen line stays in sight.
    view.wanted = query.text && !query.others ? 0 : view.line;
    const { text, ...rest } = query;
    for (const name of ["node", "rank", "attempt", "expression", "others"]) remember(name, rest[name] ?? "");
    remember("q", text ?? "");
    view.reload();
  };

  // A line with its colours and its matches; texts of jobs are never HTML.
  const lineCell = ({ data }) => {
    const cell = document.createElement("span");
    if (!data) return cell;
    const { text: whole } = data;
    // Places count characters, of which some are two units of JavaScript's strings.
    const text = /[\ud800-\udbff]/.test(whole) ? Array.from(whole) : whole;
    const slice = (from, to) => (text === whole ? whole.slice(from, to) : text.slice(from, to).join(""));
    const parts = [...(data.spans || []), ...(data.marks || []).map(([from, to]) => [from, to, "match"])];
    const ends = [...new Set([0, text.length, ...parts.flatMap(([from, to]) => [from, to])])];
    const places = ends.filter((end) => end <= text.length).sort((a, b) => a - b);
    if (places.length < 3) {
      const classes = parts.map((part) => part[2]).join(" ");
      cell.textContent = whole;
      if (classes) cell.className = classes;
      return cell;
    }
    places.slice(0, -1).forEach((from, at) => {
      const part = document.createElement("span");
      part.textContent = slice(from, places[at + 1]);
      part.className = parts.filter(([start, end]) => start <= from && from < end).map((each) => each[2]).join(" ");
      cell.append(part);
    });
    return cell;
  };

  // The whole line below the table, wrapped; among matches, a click on its number shows its neighbours.
  const openLine = (job, { data, column }) => {
    const view = logs[job];
    if (!view || !data) return;
    const place = document.getElementById("log-line");
    if (place) place.textContent = data.text;
    view.line = data.line ?? view.line;
    view.follows = false;
    view.api.redrawRows();
    remember("line", view.line);
    if (column.getColId() === "line" && view.query.text && !view.query.others) emitEvent("log-context");
  };

  const saveLog = (job) => {
    const link = document.createElement("a");
    link.href = logs[job]?.url();
    link.download = "";
    link.click();
  };

  const viewOf = (api) => Object.values(logs).find((view) => view.api === api) || {};
  const isFailure = ({ api, data }) => Boolean(data?.line) && viewOf(api).failed === data.line;
  const isChosen = (params) => Boolean(params.data?.line) && viewOf(params.api).line === params.data.line && !isFailure(params);

  const clock = ({ value }) => local(value).slice(11, 19);
  const since = ({ value }) => (value ? `at ${local(value)} or some seconds later` : "");

  // The icon of the tab has a dot in the colour of the state of the page's job.
  const showState = (state) => {
    const icon = document.querySelector("link[rel~='icon']");
    const picture = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><rect width="24" height="24" rx="5" fill="#1d4ed8"/><path d="M5 6h9v3H5zM5 11h5v3H5z" fill="#fff"/><circle cx="17" cy="17" r="6.5" fill="${colour(state) || "#6b7280"}" stroke="#fff" stroke-width="2"/></svg>`;
    if (icon) icon.href = `data:image/svg+xml,${encodeURIComponent(picture)}`;
  };

  const mayNotify = async () =>
    "Notification" in window && (await Notification.requestPermission()) === "granted";
  const notifyUser = (title, body) => {
    const note = new Notification(title, { body, icon: "/static/icon.svg" });
    note.onclick = () => window.focus();
  };

  const switchDark = () => {
    const dark = !document.body.classList.contains("body--dark");
    document.cookie = `cloudjob-console-dark=${dark ? 1 : 0}; path=/; max-age=31536000; samesite=strict`;
    emitEvent("console-dark", dark);
  };

  // -- charts ----------------------------------------------------------------------------------
  // A colour of the style sheet as it is now: a canvas cannot follow it.
  const colour = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();

  // Texts of charts that have been drawn follow the scheme.
  const recolour = async () => {
    const { echarts } = await import("nicegui-echart");
    document.querySelectorAll("[_echarts_instance_]").forEach((place) => {
      const chart = echarts.getInstanceByDom(place);
      const axes = (name) => (chart.getOption()[name] || []).map(() => ({ axisLabel: { color: colour("quiet") } }));
      const legends = (name) => (chart.getOption()[name] || []).map(() => ({ textStyle: { color: colour("quiet") } }));
      chart.setOption({ xAxis: axes("xAxis"), yAxis: axes("yAxis"), legend: legends("legend"), visualMap: legends("visualMap") });
    });
  };
  document.addEventListener("DOMContentLoaded", () => {
    let scheme = "";
    new MutationObserver(() => {
      const before = scheme;
      scheme = colour("quiet");
      if (before && before !== scheme && document.querySelector("[_echarts_instance_]")) recolour();
    }).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  });

  // The value of a key that begins with a colon is a function. An infinite number would empty a chart.
  const prepared = (value) => {
    if (typeof value === "number") return Number.isFinite(value) ? value : null;
    if (Array.isArray(value)) return value.map(prepared);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([key, item]) =>
        key.startsWith(":") ? [key.slice(1), new Function(`return (${item})`)()] : [key, prepared(item)],
      ),
    );
  };

  // NiceGUI makes a chart some time after its element.
  const chartOf = async (id) => {
    for (let left = 200; left; left--) {
      const chart = getElement(id)?.chart;
      if (chart?.getOption()) return chart;
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    throw new Error(`chart ${id} is gone`);
  };

  // An end of the zoom that is not at the end of the axis stays at its value.
  const kept = ({ start, end, startValue, endValue }) => ({
    ...(start > 0 ? { startValue } : { start: 0 }),
    ...(end < 100 ? { endValue } : { end: 100 }),
  });

  const draw = async (id, option) => {
    const chart = await chartOf(id);
    const zooms = (chart.getOption().dataZoom || []).map(kept);
    chart.setOption(prepared({ ...option, dataZoom: undefined }), { replaceMerge: ["series"] });
    zooms.forEach((zoom, dataZoomIndex) => {
      chart.dispatchAction({ type: "dataZoom", dataZoomIndex, ...zoom, escapeConnect: true });
    });
  };

  const zoomTogether = async (ids) => {
    const { echarts } = await import("nicegui-echart");
    for (const id of ids) (await chartOf(id)).group = "together";
    echarts.connect("together");
  };

  const zoomOut = async ([id]) =>
    (await chartOf(id)).dispatchAction({ type: "dataZoom", start: 0, end: 100 });

  // One bar of a row: its value is [row, start, end, whether it is within another bar].
  const bar = (params, api) => {
    const start = api.coord([api.value(1), api.value(0)]);
    const end = api.coord([api.value(2), api.value(0)]);
    const area = params.coordSys;
    const isNested = api.value(3) > 0;
    const isMark = api.value(1) === api.value(2);
    const row = Math.min(16, api.size([0, 1])[1] * 0.6);
    const height = isNested ? row * 0.45 : isMark ? row * 1.5 : row;
    const x = Math.max(start[0], area.x);
    const width = Math.max(Math.min(end[0], area.x + area.width) - x, isMark ? 4 : 2);
    const y = start[1] + (isNested ? row / 2 - height : -height / 2);
    return {
      type: "rect",
      shape: { x, y, width, height, r: isNested ? 1 : 3 },
      style: { fill: api.visual("color") },
    };
  };

  const barText = ({ marker, seriesName, name, value }) =>
    `${marker}<b>${safe(seriesName)}</b> ${safe(name)}<br>` +
    (value[1] === value[2]
      ? `at ${value[1].toFixed(2)} s`
      : `${span(value[2] - value[1])}, from ${value[1].toFixed(2)} s to ${value[2].toFixed(2)} s`);

  const number = (value) => {
    // JSON has neither NaN nor infinity.
    if (value === null) return "not finite";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e/, "e");
    // A step has all of its digits.
    const rounded = size < 1e5 ? +value.toPrecision(5) : Math.round(value);
    return rounded.toLocaleString("en-US", { maximumFractionDigits: 8 });
  };

  const elapsed = (s) => (s < 60 ? `${+s.toFixed(3)} s` : span(s));

  // The values of all lines at one place, in columns; those of a range are its mean and its ends.
  const lineText = (params) => {
    const byId = Object.fromEntries(params.map((each) => [each.seriesId, each]));
    const line = ({ marker, seriesName, value }) => `${marker}${safe(seriesName)}: <b>${number(value[1])}</b>`;
    const lines = params.filter((each) => !["mean", "low", "span"].includes(each.seriesId));
    const { mean, low, span: width } = byId;
    const heads = [`<b>${number(params[0]?.axisValue ?? 0)}</b>`];
    if (mean) heads.push(line(mean));
    if (low && width) heads.push(`${number(low.value[1])} to ${number(low.value[1] + width.value[1])}`);
    const columns = Math.ceil(lines.length / 16);
    const rows = lines.map((each) => `<span style="margin-right: 14px">${line(each)}</span>`).join("");
    return `${heads.join("<br>")}<div style="display: grid; grid-template-columns: repeat(${columns || 1}, auto)">${rows}</div>`;
  };

  const rankText = ({ data }) => {
    if (!data.sample) return `<b>rank ${data.rank}</b>, ${safe(data.state)}`;
    const { cpu_percent, rss_mib, quiet_s, threads, children, waits_percent, place } = data.sample;
    const waits = waits_percent === null ? "" : `<br>waits for others ${waits_percent} % of the time`;
    return (
      `<b>rank ${data.rank}</b> on node ${data.node}, ${safe(data.state)}<br>` +
      `silent for ${span(quiet_s)}<br>CPU ${cpu_percent} %, memory ${(rss_mib * 1.048576).toFixed(1)} MB<br>` +
      `${threads} threads, ${children} children${waits}` +
      (place ? `<br>${safe(place)}` : "")
    );
  };

  // -- keys ------------------------------------------------------------------------------------
  let before = "";
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.activeElement?.blur();
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName)) return;
    const key = event.key;
    if (key === "/") {
      const field = document.querySelector(".search input");
      if (field) {
        field.focus();
        event.preventDefault();
      }
    } else if (key === "j" && before === "g") window.location = "/";
    else if (key === "d") switchDark();
    else if (/^[1-9]$/.test(key)) document.querySelectorAll(".views .q-tab")[key - 1]?.click();
    before = key;
  });

  return {
    age: ({ value }) => (value ? short(now() - value) : ""),
    date: ({ value }) => local(value),
    times: ({ data }) => [local(data.started), local(data.ended)].filter(Boolean).join(" – "),
    seconds: ({ value }) => span(value),
    duration,
    state,
    sweep,
    result,
    grouped,
    startsGroup,
    showColumns,
    groupBy,
    openJob,
    file,
    previewButton,
    outputs,
    narrowEmulator,
    switchDark,
    showState,
    mayNotify,
    notifyUser,
    colour,
    prepared,
    draw,
    zoomTogether,
    zoomOut,
    bar,
    barText,
    elapsed,
    number,
    lineText,
    rankText,
    remember,
    jobs,
    log,
    select,
    isFailure,
    isChosen,
    clock,
    since,
    lineCell,
    openLine,
    saveLog,
    toMatch: (job, forward) => logs[job]?.toMatch(forward),
    toFailure: (job) => logs[job]?.toFailure(),
    toEnd: (job) => logs[job]?.toEnd(),
    toStart: (job) => logs[job]?.api.ensureIndexVisible(0, "top"),
    filterState: (chosen) => {
      states = chosen;
      remember("state", chosen);
      grid?.onFilterChanged();
    },
    hasStateFilter: () => states !== "all",
    hasState: (node) => node.data.state === states,
  };
})();
