//! G12: Tests of the monitoring files in `config/`: scrape example, alerts and dashboard.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cogni_gateway::base;
use cogni_gateway::base::metrics::HttpPage;
use cogni_gateway::base::metrics::discovery::ScrapeTarget;
use cogni_gateway::telemetry::access_log::FIELD_KEYS;
use cogni_gateway::telemetry::metrics::MetricsRegistry;
use cogni_gateway::telemetry::metrics::deprecated::DEPRECATED_NAMES;
use cogni_gateway::telemetry::metrics::table::{MetricFamilySpec, MetricKind};
use serde_json::Value;

use crate::metrics::record_every_family;
use crate::support::process::{TEST_TIMEOUT, free_port};

/// G12: The dashboard queries only metrics and labels that exist.
#[test]
fn the_dashboard_queries_only_existing_metrics() {
    let unknown: BTreeSet<_> =
        list_queries().iter().flat_map(|query| unknown_names(query)).collect();
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// G12: The alerts refer only to metrics and labels that exist, in their expressions and in their messages.
#[test]
fn the_alerts_use_only_existing_metrics() {
    let unknown = unknown_names(&fs::read_to_string("config/alerts.yaml").unwrap());
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// The dashboard shows every metric family.
#[test]
fn the_dashboard_shows_every_family() {
    let queries = list_queries().concat();
    let unseen: Vec<_> = MetricFamilySpec::all_families()
        .map(|family| family.name)
        .filter(|name| !queries.contains(name))
        .collect();
    assert!(unseen.is_empty(), "{unseen:#?}");
}

/// The manual explains every metric, every key of the access log and every alert, and no others.
#[test]
fn the_manual_explains_every_metric_log_key_and_alert() {
    let manual = fs::read_to_string("src/manual/operations.md").unwrap();
    let alerts = fs::read_to_string("config/alerts.yaml").unwrap();
    let alerts = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let terms =
        MetricFamilySpec::all_families().map(|family| family.name).chain(FIELD_KEYS).chain(alerts);
    let unexplained: Vec<_> = terms.filter(|term| !manual.contains(&format!("`{term}`"))).collect();
    assert!(unexplained.is_empty(), "{unexplained:#?}");
    let families: BTreeSet<_> =
        MetricFamilySpec::all_families().map(|family| family.name).collect();
    let is_former = |name: &str| DEPRECATED_NAMES.iter().any(|(old, _)| *old == name);
    let gone: Vec<_> = unknown_names(&manual)
        .into_iter()
        .filter(|name| !families.contains(&**name) && !OURS.contains(&&**name) && !is_former(name))
        .collect();
    assert!(gone.is_empty(), "{gone:#?}");
}

/// The manual says which name replaces each former one.
#[test]
fn the_manual_lists_the_former_names() {
    let manual = fs::read_to_string("src/manual/operations.md").unwrap();
    for (old, family) in DEPRECATED_NAMES {
        let row = format!("| `{old}` | `{}` |", family.name);
        assert!(manual.contains(&row), "{row}");
    }
}

/// Grafana can load the dashboard on any server: it has no fixed data source, no duplicate id, and no two panels at one
/// position.
#[test]
fn grafana_can_load_the_dashboard() {
    let dashboard = read_dashboard();
    assert_eq!(dashboard["templating"]["list"][0]["type"], "datasource");
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len());
    for (i, panel) in panels.iter().enumerate() {
        let is_row = panel["type"] == "row";
        assert!(is_row || panel["datasource"]["uid"] == "${datasource}", "{panel:#}");
        assert!(is_row || !panel["description"].as_str().unwrap().is_empty(), "{panel:#}");
        let [x, y, w, h] = grid_position(panel);
        assert!(x + w <= 24 && h > 0, "{panel:#}");
        for other in &panels[..i] {
            let [other_x, other_y, other_w, other_h] = grid_position(other);
            let is_apart = x >= other_x + other_w
                || other_x >= x + w
                || y >= other_y + other_h
                || other_y >= y + h;
            assert!(is_apart, "{} covers {}", panel["title"], other["title"]);
        }
    }
}

/// G12: promtool accepts the scrape example and the alerts, and each alert fires when it should.
#[test]
fn promtool_accepts_the_shipped_files() {
    run_promtool(&["check", "config", "config/prometheus.yaml"]);
    run_promtool(&["check", "rules", "config/alerts.yaml"]);
    run_promtool(&["test", "rules", "tests/fixtures/alerts_test.yaml"]);
}

/// G12: A real Prometheus finds the gateway by `http_sd` and scrapes it, and every panel of the dashboard has data.
#[test]
fn every_panel_has_data_of_a_real_prometheus() {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let _busy = record_every_family(&metrics);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let target = listener.local_addr().unwrap();
    let text = metrics.render_text();
    let pages = vec![
        HttpPage::metrics_page(move || text.clone()),
        HttpPage::discovery_page(ScrapeTarget {
            address: None,
            service: "gateway-of-a-test".to_owned(),
        }),
    ];
    runtime.spawn(base::metrics::serve_pages(listener, pages, std::future::pending()));

    // Prometheus is configured with the discovery address only, not with the target.
    let prometheus = MonitoringPrometheus::start(target);
    let found = format!(r#"up{{instance="{target}", service="gateway-of-a-test"}} == 1"#);
    prometheus.wait_until(&found, |answer| {
        answer["data"]["result"].as_array().is_some_and(|series| series.len() == 1)
    });
    for query in list_queries().iter().filter(|query| !query.starts_with("label_values")) {
        let asked = filled_in(query);
        prometheus.wait_until(&asked, |answer| {
            answer["data"]["result"].as_array().is_some_and(|series| !series.is_empty())
        });
    }
}

/// Returns the names in a text that are neither a metric nor a label.
fn unknown_names(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| OURS.iter().any(|prefix| word.starts_with(prefix)));
    let names: BTreeSet<_> = list_names().into_iter().collect();
    let labels: BTreeSet<_> =
        MetricFamilySpec::all_families().flat_map(|family| family.labels).copied().collect();
    let unknown = ours.filter(|word| !names.contains(*word) && !labels.contains(word));
    unknown.map(str::to_owned).chain(unknown_labels(text)).collect()
}

/// Returns the selectors in a text that use a label which their family does not have.
fn unknown_labels(text: &str) -> Vec<String> {
    let mut unknown = vec![];
    for (at, _) in text.match_indices('{') {
        let name =
            text[..at].rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap();
        let Some(family) = MetricFamilySpec::all_families()
            .find(|family| series_of(family).iter().any(|series| series == name))
        else {
            continue;
        };
        let selector = text[at + 1..].split('}').next().unwrap();
        for matcher in selector.split(", ") {
            let label = matcher.split(['=', '!']).next().unwrap().trim();
            if !family.labels.contains(&label) && !["job", "instance", "le"].contains(&label) {
                unknown.push(format!("{name}{{{matcher}}}"));
            }
        }
    }
    unknown
}

/// The prefixes of the gateway's metric names.
const OURS: [&str; 11] = [
    "api_",
    "billing_",
    "cogni_gateway_",
    "events_dropped",
    "gen_ai_",
    "process_",
    "relay_deliveries",
    "sandbox_run",
    "sandbox_start_",
    "state_db_",
    "supervisor_",
];

/// Returns every name that a query may use.
fn list_names() -> Vec<String> {
    let metrics = MetricsRegistry::new("litellm").unwrap();
    let text = String::from_utf8(metrics.render_text()).unwrap();
    let process =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE process_")?.split(' ').next());
    let process = process.map(|name| format!("process_{name}"));
    MetricFamilySpec::all_families().flat_map(series_of).chain(process).collect()
}

fn series_of(family: &MetricFamilySpec) -> Vec<String> {
    match family.kind {
        MetricKind::Histogram(_) => {
            ["bucket", "sum", "count"].map(|part| format!("{}_{part}", family.name)).to_vec()
        }
        MetricKind::Counter | MetricKind::Gauge => vec![family.name.to_owned()],
    }
}

/// Returns every query of the dashboard.
fn list_queries() -> Vec<String> {
    let dashboard = read_dashboard();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let of_panels = targets.map(|target| &target["expr"]);
    let of_variables = variables.filter_map(|variable| variable["query"].get("query"));
    of_panels.chain(of_variables).map(|query| query.as_str().unwrap().to_owned()).collect()
}

fn read_dashboard() -> Value {
    serde_json::from_str(&fs::read_to_string("config/grafana-dashboard.json").unwrap()).unwrap()
}

fn grid_position(panel: &Value) -> [u64; 4] {
    ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap())
}

/// Fills in the variables of a query as Grafana does.
fn filled_in(query: &str) -> String {
    let variables = ["$job", "$instance", "$model", "$run", "$agent"];
    let query = query.replace("$__rate_interval", "1m");
    variables.iter().fold(query, |query, variable| query.replace(variable, ".*"))
}

fn run_promtool(arguments: &[&str]) {
    let ran = Command::new("promtool").args(arguments).output();
    let output = ran.expect("this test needs promtool: apt-get install prometheus");
    let printed = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{printed}");
}

/// A Prometheus process that is stopped when dropped.
struct MonitoringPrometheus {
    process: Child,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl MonitoringPrometheus {
    fn start(target: SocketAddr) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("prometheus.yaml");
        fs::write(&config, scrape_config(target)).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let process = Command::new("prometheus")
            .arg(format_flag("config.file", &config))
            .arg(format_flag("storage.tsdb.path", &dir.path().join("data")))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let process = process.expect("this test needs Prometheus: apt-get install prometheus");
        Self { process, address, _folder: dir }
    }

    /// Repeats the query until the answer is acceptable.
    fn wait_until(&self, query: &str, will_do: impl Fn(&Value) -> bool) {
        let begun = Instant::now();
        loop {
            let answer = self.ask(query);
            if answer.as_ref().is_some_and(&will_do) {
                return;
            }
            assert!(begun.elapsed() < TEST_TIMEOUT, "{query}: {answer:?}");
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }

    fn ask(&self, query: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(self.address).ok()?;
        let body = format!("query={}", encode_url(query));
        let length = body.len();
        let head = "POST /api/v1/query HTTP/1.0\r\nContent-Type: application/x-www-form-urlencoded";
        write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }
}

impl Drop for MonitoringPrometheus {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn scrape_config(target: SocketAddr) -> String {
    format!(
        "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: cogni-gateway\n  http_sd_configs: [{{url: 'http://{target}/sd', refresh_interval: 1s}}]\n"
    )
}

fn format_flag(name: &str, value: &Path) -> String {
    format!("--{name}={}", value.display())
}

fn encode_url(text: &str) -> String {
    text.bytes().fold(String::new(), |all, byte| all + &format!("%{byte:02x}"))
}
