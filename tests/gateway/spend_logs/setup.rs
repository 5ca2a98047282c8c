//! Postgres, a LiteLLM that keeps its spend there, and the endpoint of LiteLLM's callback.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use cogni_gateway::service::billing::BillingStore;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::peers::command_output;
use crate::peers::setup::{KEY, curl_fail, curl_succeeds, peers_file, venv_path};
use crate::support::process::{ChildProcess, free_port, wait_until};

pub(super) const REMEDY: &str = "`tests/run billing` installs what is missing and runs this test";

pub(super) const SECRET: &str = "callback-secret";

/// A temporary server on loopback that does not sync to disk.
pub(super) struct PostgresServer {
    url: String,
    _process: ChildProcess,
    _folder: TempDir,
}

impl PostgresServer {
    /// Starts Postgres with LiteLLM's tables.
    pub(super) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        // Postgres refuses to run as root.
        if rustix::process::geteuid().is_root() {
            chown(dir.path(), Some(UNPRIVILEGED_USER), Some(UNPRIVILEGED_USER)).unwrap();
        }
        let programs = programs_dir();
        let port = free_port().to_string();
        command_output(
            as_nobody(Command::new(programs.join("initdb")).current_dir("/"))
                .args([
                    "--auth=trust",
                    "--username=litellm",
                    "--encoding=UTF8",
                    "--no-sync",
                    "--pgdata",
                ])
                .arg(&data),
        );
        let settings = [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "fsync=off",
            "synchronous_commit=off",
            "full_page_writes=off",
        ];
        let settings = settings.iter().flat_map(|setting| ["-c", setting]);
        let process = ChildProcess::start(
            as_nobody(Command::new(programs.join("postgres")).current_dir("/"))
                .arg("-D")
                .arg(&data)
                .args(["-p", &port])
                .args(settings),
            REMEDY,
        );
        let url = format!("postgresql://litellm@127.0.0.1:{port}");
        let psql = |database: &str| {
            let mut psql = Command::new(programs.join("psql"));
            psql.args(["--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1"])
                .arg(format!("{url}/{database}"));
            psql
        };
        let create = || psql("postgres").arg("--command=CREATE DATABASE litellm").output().unwrap();
        wait_until(|| create().status.success(), || process.output());
        let schema = venv_path("prisma").join("schema.sql");
        assert!(schema.exists(), "{REMEDY}");
        command_output(psql("litellm").arg("--file").arg(schema));
        Self { url: format!("{url}/litellm"), _process: process, _folder: dir }
    }
}

/// Returns Debian's directory of the server programs, which is not in `PATH`.
fn programs_dir() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql")
        .unwrap_or_else(|error| panic!("PostgreSQL: {error}; {REMEDY}"));
    let folders = versions.map(|version| version.unwrap().path().join("bin"));
    folders.filter(|directory| directory.join("initdb").exists()).max().expect(REMEDY)
}

fn as_nobody(command: &mut Command) -> &mut Command {
    if rustix::process::geteuid().is_root() {
        command.uid(UNPRIVILEGED_USER).gid(UNPRIVILEGED_USER)
    } else {
        command
    }
}

/// LiteLLM with the fake provider behind it, Postgres for its spend, and a callback endpoint.
pub(super) struct LitellmWithDatabase {
    pub(super) address: String,
    process: ChildProcess,
}

impl LitellmWithDatabase {
    /// Starts LiteLLM with a callback to `endpoint` that sends `token`.
    pub(super) fn start(
        provider: &str,
        postgres: &PostgresServer,
        (endpoint, token): (&str, &str),
    ) -> Self {
        let port = free_port().to_string();
        let address = format!("127.0.0.1:{port}");
        let mut process = ChildProcess::start(
            Command::new(venv_path("litellm").join("bin/litellm"))
                .arg("--config")
                .arg(peers_file("spend.yaml"))
                .args(["--host", "127.0.0.1", "--port", &port])
                .env("LITELLM_MASTER_KEY", KEY)
                .env("LITELLM_SALT_KEY", "sk-salt")
                .env("PROVIDER", format!("http://{provider}"))
                .env("PROVIDER_V1", format!("http://{provider}/v1"))
                .env("DATABASE_URL", &postgres.url)
                // The migrations are done already; LiteLLM would need another of Prisma's programs for them.
                .env("DISABLE_SCHEMA_UPDATE", "true")
                .env(
                    "PATH",
                    format!("{}:{}", venv_path("prisma").join("bin").display(), env!("PATH")),
                )
                .env("PRISMA_QUERY_ENGINE_BINARY", venv_path("prisma").join("query-engine"))
                .env("GENERIC_LOGGER_ENDPOINT", endpoint)
                .env("GENERIC_LOGGER_HEADERS", format!("Authorization=Bearer {token}"))
                .env("DEFAULT_FLUSH_INTERVAL_SECONDS", "1")
                .env("PYTHONDONTWRITEBYTECODE", "1")
                // Otherwise LiteLLM would fetch its price list from the internet.
                .env("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
            REMEDY,
        );
        let ready = format!("http://{address}/health/readiness");
        process.until(|_| curl_succeeds(&curl_fail(&ready)));
        Self { address, process }
    }

    pub(super) fn output(&self) -> String {
        self.process.output()
    }
}

/// The endpoint of LiteLLM's callback, as the service has it: a caller with the secret may write to the billing store.
pub(super) struct CallbackReceiver {
    address: String,
    books: BillingStore,
    told: Arc<Mutex<Vec<String>>>,
    runtime: Runtime,
}

impl CallbackReceiver {
    pub(super) fn start(store: BillingStore) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (keeper, telling) = (store.clone(), Arc::clone(&lines));
        thread::spawn(move || {
            let runtime = Runtime::new().unwrap();
            for connection in listener.incoming() {
                take_callback(connection.unwrap(), |body| {
                    let ingested = runtime.block_on(keeper.ingest(body.to_vec())).unwrap();
                    telling.lock().unwrap().push(serde_json::to_string(&ingested).unwrap());
                });
            }
        });
        Self { address, books: store, told: lines, runtime: Runtime::new().unwrap() }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://{}/ingest", self.address)
    }

    pub(super) fn books(&self) -> &BillingStore {
        &self.books
    }

    pub(super) fn block_on<F: Future>(&self, work: F) -> F::Output {
        self.runtime.block_on(work)
    }

    /// Returns the outcome of each batch.
    pub(super) fn told(&self) -> String {
        self.told.lock().unwrap().join("; ")
    }
}

fn take_callback(connection: TcpStream, ingest: impl FnOnce(&[u8])) {
    let mut reader = BufReader::new(connection);
    let (mut length, mut is_let_in) = (0, false);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let (name, value) = line.trim().split_once(": ").unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "authorization" => is_let_in = value == format!("Bearer {SECRET}"),
            _ if line.trim().is_empty() => break,
            _ => (),
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    assert!(is_let_in, "LiteLLM has not shown the secret");
    ingest(&body);
    let _left = reader
        .get_mut()
        .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
}

/// Debian's user without rights, 65534.
const UNPRIVILEGED_USER: u32 = 65534;
