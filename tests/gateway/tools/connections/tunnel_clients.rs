//! T6: Tests with real clients that use the servers' own addresses: curl, git, pip, Python, npm and Node.js work
//! through a tunnel, with the variables of a sandbox and nothing else, and see no credential.

use std::collections::BTreeMap;
use std::fs;

use serde_json::json;

use super::clients::{
    SandboxPort, WHEEL, all_text, index_answer, make_package, make_repository, make_wheel, shown,
};
use super::server::{Answer, SecureServer};
use super::tunnel::{HOST, start_tunnelled};
use super::{SECRET, SecretFile};
use crate::support::git_server::GitServer;
use crate::support::test_ca::TestCa;

/// T6: curl downloads and uploads by the usual address, and reaches no other host.
#[tokio::test(flavor = "multi_thread")]
async fn curl_uses_the_usual_address() {
    let server = SecureServer::named(HOST, |seen| {
        let is_known = seen.headers["authorization"] == format!("Bearer {SECRET}");
        Answer::text(format!("{is_known} {} {}", seen.method, seen.body.len()))
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let rules = "tunnel = true\nallow = ['GET /repos/**', 'PUT /up']";
    let table = server.table("api", &format!("{}{rules}", secret.line));
    let app = start_tunnelled(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let url = server.url();
    let got = sandbox.run("curl", &["-sS", &format!("{url}/repos/a")]).await;
    assert_eq!(String::from_utf8_lossy(&got.stdout), "true GET 0", "{}", shown(&got));
    fs::write(sandbox.home().join("large"), vec![b'x'; 3_000_000]).unwrap();
    // The client's own credential is dropped.
    let own = ["-sS", "-H", "authorization: Bearer own", "-T", "large", &format!("{url}/up")];
    let put = sandbox.run("curl", &own).await;
    assert_eq!(String::from_utf8_lossy(&put.stdout), "true PUT 3000000", "{}", shown(&put));
    let denied = sandbox.run("curl", &["-sS", &format!("{url}/other")]).await;
    assert!(shown(&denied).contains("policy_denied"), "{}", shown(&denied));
    let other = sandbox.run("curl", &["-sS", "https://other.example.test/"]).await;
    assert!(!other.status.success() && shown(&other).contains("403"), "{}", shown(&other));
    let left = [&got, &put, &denied, &other].map(shown).concat() + &all_text(sandbox.home());
    assert!(!left.contains(SECRET));
    app.stop().await;
}

/// T6: git clones a private repository, and cannot push.
#[tokio::test(flavor = "multi_thread")]
async fn git_clones_through_a_tunnel() {
    let root = tempfile::tempdir().unwrap();
    make_repository(root.path());
    let ca = TestCa::new();
    let server = GitServer::start_tls(root.path(), SECRET, ca.server(HOST, &["http/1.1"]));
    let secret = SecretFile::new(SECRET, ", basic = 'x-access-token'");
    let port = server.address.port();
    let table = format!(
        "[connections.code]\nurl = 'https://{HOST}:{port}'\nca_file = '{}'\nallow_private_addresses = true\n{}\
         allow = ['GET /acme/*/info/refs', 'POST /acme/*/git-upload-pack']\ntunnel = true\n",
        ca.file.display(),
        secret.line
    );
    let app = start_tunnelled(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let address = format!("https://{HOST}:{port}/acme/site.git");
    let cloned = sandbox.run("git", &["clone", "-q", &address]).await;
    assert!(cloned.status.success(), "{}", shown(&cloned));
    let text = fs::read_to_string(sandbox.home().join("site/file.txt")).unwrap();
    assert!(text.starts_with("private text"));
    let pushed = sandbox.run("git", &["-C", "site", "push", "origin", "HEAD:other"]).await;
    assert!(!pushed.status.success() && shown(&pushed).contains("403"), "{}", shown(&pushed));
    let left = all_text(sandbox.home()) + &shown(&cloned) + &shown(&pushed);
    assert!(!left.contains(SECRET));
    app.stop().await;
}

/// T6: pip downloads a package from a private index, and Python's own client reads the index.
#[tokio::test(flavor = "multi_thread")]
async fn pip_downloads_through_a_tunnel() {
    let (link, content) = make_wheel();
    let files = BTreeMap::from([
        ("/simple/demo-pkg/".to_owned(), ("text/html".to_owned(), link.into_bytes())),
        (format!("/files/{WHEEL}"), ("application/octet-stream".to_owned(), content.clone())),
    ]);
    let server = SecureServer::named(HOST, move |seen| index_answer(seen, &files)).await;
    let secret = SecretFile::new(SECRET, "");
    let rules = "tunnel = true\nallow = ['GET /simple/**', 'GET /files/**']";
    let table = server.table("index", &format!("{}{rules}", secret.line));
    let app = start_tunnelled(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let index = format!("{}/simple", server.url());
    let quiet = ["-m", "pip", "download", "-q", "--no-cache-dir", "--disable-pip-version-check"];
    let download = [&quiet[..], &["--index-url", &index, "demo-pkg"]].concat();
    let downloaded = sandbox.run("python3", &download).await;
    assert!(downloaded.status.success(), "{}\n{:?}", shown(&downloaded), server.seen());
    assert_eq!(fs::read(sandbox.home().join(WHEEL)).unwrap(), content);
    let script = format!(
        "import urllib.request\nfrom pip._vendor import requests\nurl = '{index}/demo-pkg/'\n\
         print(len(urllib.request.urlopen(url).read()), requests.get(url).status_code)"
    );
    let read = sandbox.run("python3", &["-c", &script]).await;
    let length = server.seen().len();
    assert!(read.status.success() && shown(&read).contains(" 200"), "{}", shown(&read));
    assert!(length >= 4, "{:?}", server.seen());
    let left = all_text(sandbox.home()) + &shown(&downloaded) + &shown(&read);
    assert!(!left.contains(SECRET));
    app.stop().await;
}

/// T6: npm installs a package of a scope from a private registry by its own address.
#[tokio::test(flavor = "multi_thread")]
async fn npm_installs_through_a_tunnel() {
    let content = make_package();
    let server = SecureServer::named(HOST, move |seen| {
        let authority = seen.headers["host"].to_str().unwrap();
        let document = json!({
            "name": "@acme/demo",
            "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": {
                "name": "@acme/demo",
                "version": "1.0.0",
                "dist": {"tarball": format!("https://{authority}/@acme/demo/-/demo-1.0.0.tgz")},
            }},
        });
        let json = ("application/json".to_owned(), document.to_string().into_bytes());
        let archive = ("application/octet-stream".to_owned(), content.clone());
        let files = BTreeMap::from([
            ("/@acme%2fdemo".to_owned(), json),
            ("/@acme/demo/-/demo-1.0.0.tgz".to_owned(), archive),
        ]);
        index_answer(seen, &files)
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let rules = "tunnel = true\nallow = ['GET /@acme%2f*', 'GET /@acme/*/-/*']";
    let table = server.table("npm", &format!("{}{rules}", secret.line));
    let app = start_tunnelled(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    let registry = format!("--registry={}/", server.url());
    let arguments = [
        "install",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        &registry,
        "@acme/demo@1.0.0",
    ];
    let installed = sandbox.run("npm", &arguments).await;
    assert!(installed.status.success(), "{}\n{:?}", shown(&installed), server.seen());
    let module = sandbox.home().join("node_modules/@acme/demo/index.js");
    assert_eq!(fs::read_to_string(module).unwrap(), "module.exports = 42\n");
    assert!(!(all_text(sandbox.home()) + &shown(&installed)).contains(SECRET));
    app.stop().await;
}

/// T6: Node.js trusts the run's authority, and asks through the proxy that its variables name.
#[tokio::test(flavor = "multi_thread")]
async fn node_asks_through_a_tunnel() {
    let server = SecureServer::named(HOST, |_| Answer::text("answered")).await;
    let secret = SecretFile::new(SECRET, "");
    let table = server.table("api", &format!("{}tunnel = true\nallow = ['GET /**']", secret.line));
    let app = start_tunnelled(&table).await;
    let sandbox = SandboxPort::open(&app, &table).await;
    // Node.js before 22.21 has no proxy of its own, so this program makes the tunnel itself.
    let script = format!(
        "const proxy = new URL(process.env.HTTPS_PROXY);
        const target = '{}';
        const http = require('http');
        const asked = http.request({{ host: proxy.hostname, port: proxy.port, method: 'CONNECT', path: target }});
        asked.on('connect', (answer, socket) => {{
            const tls = require('tls').connect({{ socket, servername: '{HOST}' }}, () => {{
                const own = {{ path: '/a', headers: {{ host: target }}, createConnection: () => tls }};
                http.get(own, (answer) => answer.pipe(process.stdout));
            }});
        }});
        asked.end();",
        server.authority()
    );
    let read = sandbox.run("node", &["-e", &script]).await;
    assert_eq!(String::from_utf8_lossy(&read.stdout), "answered", "{}", shown(&read));
    app.stop().await;
}
