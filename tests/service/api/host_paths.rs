//! A3: Tests of errors on this machine: a tenant gets them without this machine's paths, which are only in the log.

use std::fs;
use std::path::Path;

use cogni_gateway::runner::agents;
use serde_json::{Value, json};

use super::run_body;
use crate::support::service::{MintedGrant, ServiceProcess, ServiceSetup};

#[tokio::test(flavor = "multi_thread")]
async fn no_text_for_a_tenant_has_a_path_of_this_machine() {
    let setup = ServiceSetup::new("").await;
    let agents = setup.path().join("agents");
    fs::create_dir_all(&agents).unwrap();
    let entry = agents::builtin_file("sandbox:agent").unwrap();
    let root = format!("rootfs = \"{}/no-root\"\nargv = ", setup.path().display());
    let rootless = entry.replace("\"sandbox:agent\"", "\"sandbox:rootless\"");
    let rootless = rootless.replacen("argv = ", &root, 1);
    fs::write(agents.join("sandbox-rootless.toml"), rootless).unwrap();
    fs::write(agents.join("sandbox-agent.toml"), entry).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    let service = setup.start();
    let tenant = setup.grant(&["--repo", "http://127.0.0.1:9/*"]);
    let (mut with_branch, mut rootless) = (run_body("fake"), run_body("fake"));
    with_branch["repo"] = json!("http://127.0.0.1:9/acme/site");
    with_branch["branchKey"] = json!("task-1");
    rootless["agent"] = json!("sandbox:rootless");
    let state = setup.state_dir();
    let texts = TenantTexts { place: &setup, service: &service, tenant: &tenant };
    texts.look("nothing", &run_body("fake"), None).await;
    texts.look("no remote", &with_branch, None).await;
    texts.look("no root", &rootless, None).await;
    texts.look("no run directory", &run_body("fake"), Some(&setup.run_dir())).await;
    texts.look("no audit logs", &run_body("fake"), Some(&state.join("audit"))).await;
    texts.look("no mirrors", &with_branch, Some(&state.join("mirrors"))).await;
    for entry in fs::read_dir(&state).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("cogni-init-") {
            texts.look("no first process", &run_body("fake"), Some(&path)).await;
        }
    }
    let output = service.process.output();
    assert!(
        output.contains("masked the paths of this machine in a text for the caller"),
        "{output}"
    );
    assert!(output.contains(&*state.join("audit").to_string_lossy()), "the log has it: {output}");
    setup.stop(service);
}

/// Every text that a tenant receives.
struct TenantTexts<'a> {
    place: &'a ServiceSetup,
    service: &'a ServiceProcess,
    tenant: &'a MintedGrant,
}

impl TenantTexts<'_> {
    /// Requests a run while something else is at the path of a file or directory of the service.
    async fn look(&self, name: &str, ask: &Value, gone: Option<&Path>) {
        let away = gone.map(|path| (path, path.with_extension("away")));
        if let Some((path, away)) = &away {
            if path.exists() {
                fs::rename(path, away).unwrap();
            }
            // These can be neither created nor replaced.
            if path.to_string_lossy().contains("cogni-init-") {
                fs::create_dir_all(path.join("in-the-way")).unwrap();
            } else {
                fs::write(path, "").unwrap();
            }
        }
        let begun = self.tenant.post("/api/v1/runs", ask).await;
        self.check(name, begun.text());
        if begun.status.is_success() {
            let run = begun.json()["id"].as_str().unwrap().to_owned();
            let row = self.tenant.ended(&run).await;
            self.check(name, &row.to_string());
            for path in ["events", "relay", "audit", "output", "artifacts"] {
                self.check(
                    name,
                    self.tenant.get(&format!("/api/v1/runs/{run}/{path}")).await.text(),
                );
            }
        }
        for path in ["/api/v1/ai/agents?all=1", "/readyz"] {
            self.check(name, self.service.get(path).await.text());
        }
        if let Some((path, away)) = &away {
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
            if away.exists() {
                fs::rename(away, path).unwrap();
            }
        }
    }

    fn check(&self, name: &str, text: &str) {
        let place = self.place.path().display().to_string();
        assert!(!text.contains(&place), "{name}: {text}");
    }
}
