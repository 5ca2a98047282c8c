//! T6: Tests with real clients: git, pip and npm work through a connection without a change, and see no credential.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use cogni_gateway::runner::tool_opener::connection_variables;
use http::Method;
use serde_json::json;
use tempfile::TempDir;
use tokio::net::{TcpListener, UnixStream};

use super::server::{Answer, ConnectedRequest, SecureServer};
use super::{SECRET, SecretFile, start_app};
use crate::support::app::TestApp;
use crate::support::git_server::GitServer;
use crate::support::test_ca::TestCa;
use crate::tools::tool_settings;

/// The environment of a sandbox: a port of this machine that leads to the run's socket, and the variables of the run's
/// connections.
pub(crate) struct SandboxPort {
    pub(crate) variables: BTreeMap<String, String>,
    home: TempDir,
}

impl SandboxPort {
    /// Opens the port, and writes the certificate of the run's tunnels if it has some.
    pub(crate) async fn open(app: &TestApp, table: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let socket = app.socket.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let socket = socket.clone();
                tokio::spawn(async move {
                    let mut server = UnixStream::connect(&socket).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        let port = format!("localhost:{port}");
        let mut variables = connection_variables(&tool_settings(table)).unwrap();
        let home = tempfile::tempdir().unwrap();
        let certificate = home.path().join("tunnel-ca.pem");
        for text in variables.values_mut() {
            *text = text.replace("localhost:8080", &port);
            *text = text.replace("/run/tunnel-ca.pem", certificate.to_str().unwrap());
        }
        let answer = app.client().get("/connect/ca.pem").await;
        if answer.status == 200 {
            fs::write(certificate, &answer.body).unwrap();
        }
        Self { variables, home }
    }

    pub(super) fn home(&self) -> &Path {
        self.home.path()
    }

    /// Runs a program with the variables of the sandbox only.
    pub(crate) async fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.home()).env_clear();
        command.envs(&self.variables).env("HOME", self.home());
        command.env("PATH", std::env::var_os("PATH").unwrap());
        command.env("GIT_TERMINAL_PROMPT", "0");
        // Node.js 18 does not try the second address of `localhost`. A sandbox has only this one.
        command.env("NODE_OPTIONS", "--dns-result-order=ipv4first");
        tokio::task::spawn_blocking(move || command.output().expect("the client is installed"))
            .await
            .unwrap()
    }
}

pub(crate) fn shown(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{out}\n{error}", output.status)
}

/// Returns all files below a directory as one text.
pub(super) fn all_text(directory: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text += &all_text(&path);
        } else {
            text += &String::from_utf8_lossy(&fs::read(&path).unwrap_or_default());
        }
    }
    text
}

fn run_host(directory: &Path, program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
}

fn run_git(directory: &Path, arguments: &[&str]) {
    let own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"];
    run_host(directory, "git", &[&own, arguments].concat());
}

/// Makes a repository `acme/site.git` with one commit below a directory.
pub(super) fn make_repository(root: &Path) {
    run_git(root, &["init", "-q", "work"]);
    let work = root.join("work");
    fs::write(work.join("file.txt"), "private text\n".repeat(5000)).unwrap();
    run_git(&work, &["add", "."]);
    run_git(&work, &["commit", "-q", "-m", "one"]);
    run_git(root, &["clone", "-q", "--bare", "work", "acme/site.git"]);
}

/// T6: git clones a private repository by its usual address, and a push that no rule allows is refused.
#[tokio::test(flavor = "multi_thread")]
async fn git_clones_by_the_usual_address() {
    let root = tempfile::tempdir().unwrap();
    make_repository(root.path());
    let ca = TestCa::new();
    let server = GitServer::start_tls(root.path(), SECRET, ca.server("localhost", &["http/1.1"]));
    let secret = SecretFile::new(SECRET, ", basic = 'x-access-token'");
    let table = format!(
        "[connections.code]\nurl = 'https://localhost:{}'\nca_file = '{}'\nallow_private_addresses = true\n{}\
         allow = ['GET /acme/*/info/refs', 'POST /acme/*/git-upload-pack']\ngit = ['https://git.example.com/']\n",
        server.address.port(),
        ca.file.display(),
        secret.line
    );
    let app = start_app(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let cloned =
        sandbox.run("git", &["clone", "-q", "https://git.example.com/acme/site.git"]).await;
    assert!(cloned.status.success(), "{}", shown(&cloned));
    let site = sandbox.home().join("site");
    let text = fs::read_to_string(site.join("file.txt")).unwrap();
    assert!(text.starts_with("private text"));
    run_git(&site, &["commit", "-q", "--allow-empty", "-m", "two"]);
    let pushed = sandbox.run("git", &["-C", "site", "push", "origin", "main"]).await;
    assert!(!pushed.status.success() && shown(&pushed).contains("403"), "{}", shown(&pushed));
    let evil = ["clone", "https://git.example.com/evil/site.git", "evil"];
    let other = sandbox.run("git", &evil).await;
    assert!(!other.status.success() && shown(&other).contains("403"), "{}", shown(&other));
    let left = all_text(sandbox.home()) + &shown(&cloned) + &shown(&pushed);
    assert!(!left.contains(SECRET));
    assert!(server.seen().iter().all(|line| line.ends_with("200")), "{:?}", server.seen());
    app.stop().await;
}

/// Answers like a private index of packages: only clients with the credential receive something.
pub(super) fn index_answer(
    seen: &ConnectedRequest,
    files: &BTreeMap<String, (String, Vec<u8>)>,
) -> Answer {
    let is_known = seen
        .headers
        .get("authorization")
        .is_some_and(|value| value.to_str().unwrap() == format!("Bearer {SECRET}"));
    let refused = |status| Answer { status, ..Answer::text("no") };
    match files.get(&seen.target) {
        _ if !is_known || seen.method != Method::GET => refused(401),
        None => refused(404),
        Some((kind, content)) => {
            let length = content.len().to_string();
            Answer::text(content.clone()).with("content-type", kind).with("content-length", &length)
        }
    }
}

/// Makes a wheel, and returns the page of an index that links to it, and its content.
pub(super) fn make_wheel() -> (String, Vec<u8>) {
    let place = tempfile::tempdir().unwrap();
    let make = format!(
        "import zipfile\nz = zipfile.ZipFile('{WHEEL}', 'w')\nz.writestr('demo_pkg.py', 'VALUE = 42\\n')\n\
         d = 'demo_pkg-1.0.dist-info/'\nz.writestr(d + 'METADATA', 'Metadata-Version: 2.1\\nName: demo-pkg\\nVersion: 1.0\\n')\n\
         z.writestr(d + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
         z.writestr(d + 'RECORD', '')\nz.close()\n"
    );
    run_host(place.path(), "python3", &["-c", &make]);
    let link = format!(
        "<!DOCTYPE html><html><body><a href=\"../../files/{WHEEL}\">{WHEEL}</a></body></html>"
    );
    let content = fs::read(place.path().join(WHEEL)).unwrap();
    (link, content)
}

/// T6: pip installs a package from a private index.
#[tokio::test(flavor = "multi_thread")]
async fn pip_installs_from_a_private_index() {
    let (link, content) = make_wheel();
    let files = BTreeMap::from([
        ("/root/simple/demo-pkg/".to_owned(), ("text/html".to_owned(), link.into_bytes())),
        (format!("/root/files/{WHEEL}"), ("application/octet-stream".to_owned(), content)),
    ]);
    let server = SecureServer::answering(move |seen| index_answer(seen, &files)).await;
    let secret = SecretFile::new(SECRET, "");
    let table = server.table(
        "index",
        &format!(
            "{}allow = ['GET /simple/**', 'GET /files/**']\nenv = {{ PIP_INDEX_URL = '${{URL}}/simple' }}",
            secret.line
        ),
    );
    let table = table.replace(&server.url(), &format!("{}/root", server.url()));
    let app = start_app(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let arguments = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--target",
        "lib",
        "demo-pkg",
    ];
    let installed = sandbox.run("python3", &arguments).await;
    assert!(installed.status.success(), "{}\n{:?}", shown(&installed), server.seen());
    let module = fs::read_to_string(sandbox.home().join("lib/demo_pkg.py")).unwrap();
    assert_eq!(module, "VALUE = 42\n");
    assert!(!(all_text(sandbox.home()) + &shown(&installed)).contains(SECRET));
    app.stop().await;
}

/// Makes the archive of a package of npm.
pub(super) fn make_package() -> Vec<u8> {
    let place = tempfile::tempdir().unwrap();
    let package = place.path().join("package");
    fs::create_dir(&package).unwrap();
    let manifest = r#"{"name": "@acme/demo", "version": "1.0.0", "main": "index.js"}"#;
    fs::write(package.join("package.json"), manifest).unwrap();
    fs::write(package.join("index.js"), "module.exports = 42\n").unwrap();
    run_host(place.path(), "tar", &["czf", "demo.tgz", "package"]);
    fs::read(place.path().join("demo.tgz")).unwrap()
}

/// T6: npm installs a package of a scope from a private registry whose links are absolute.
#[tokio::test(flavor = "multi_thread")]
async fn npm_installs_from_a_private_registry() {
    let content = make_package();
    let registry = Arc::new(Mutex::new(String::new()));
    let own_url = Arc::clone(&registry);
    let server = SecureServer::answering(move |seen| {
        let url = own_url.lock().unwrap().clone();
        let document = json!({
            "name": "@acme/demo",
            "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": {
                "name": "@acme/demo",
                "version": "1.0.0",
                "dist": {"tarball": format!("{url}/npm/@acme/demo/-/demo-1.0.0.tgz")},
            }},
        });
        let json = ("application/json".to_owned(), document.to_string().into_bytes());
        let files = BTreeMap::from([
            ("/npm/@acme%2fdemo".to_owned(), json),
            (
                "/npm/@acme/demo/-/demo-1.0.0.tgz".to_owned(),
                ("application/octet-stream".to_owned(), content.clone()),
            ),
        ]);
        index_answer(seen, &files)
    })
    .await;
    *registry.lock().unwrap() = server.url();
    let secret = SecretFile::new(SECRET, "");
    let rules = "allow = ['GET /@acme%2f*', 'GET /@acme/*/-/*']\nrewrite_links = true\n\
         env = { npm_config_registry = '${URL}/', npm_config_replace_registry_host = 'never' }";
    let table = server.table("npm", &format!("{}{rules}", secret.line));
    let table = table.replace(&server.url(), &format!("{}/npm", server.url()));
    let app = start_app(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let arguments =
        ["install", "--no-audit", "--no-fund", "--no-update-notifier", "@acme/demo@1.0.0"];
    let installed = sandbox.run("npm", &arguments).await;
    assert!(installed.status.success(), "{}\n{:?}", shown(&installed), server.seen());
    let module = sandbox.home().join("node_modules/@acme/demo/index.js");
    assert_eq!(fs::read_to_string(module).unwrap(), "module.exports = 42\n");
    assert!(!(all_text(sandbox.home()) + &shown(&installed)).contains(SECRET));
    app.stop().await;
}

/// The name of the wheel.
pub(super) const WHEEL: &str = "demo_pkg-1.0-py3-none-any.whl";
