//! A real Docker Engine, driven through its command line as an operator would.
//!
//! Every object carries a label that is unique to its [`PrivateEngine`], and is removed with it, also when a test panics.

use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use uuid::Uuid;

/// The image under test, built by `docker/build`.
pub(crate) const GATEWAY: &str = "cogni-gateway:dev";

/// A shell, socat, curl and nginx, copied from this machine by `docker/from-host`.
pub(crate) const HOST: &str = "cogni-gateway-test:host";

pub(crate) const SOCKET: &str = "/var/run/docker.sock";

/// Only busybox, copied by `docker/from-host`.
pub(crate) const BUSYBOX: &str = "cogni-gateway-test:busybox";

/// The `cogni-init` that the gateway carries.
pub(crate) fn init_path() -> &'static str {
    concat!(env!("OUT_DIR"), "/cogni-init")
}

/// Panics with the command to run, if there is no engine or one of the `images` is missing.
pub(crate) fn need_images(images: &[&str]) {
    for image in images {
        let found = run_docker(&["image", "inspect", "--format", "{{.Id}}", image]);
        assert!(
            found.status.success(),
            "this test needs Docker Engine and the image `{image}`; `tests/run image` sets up both. Docker says: {}",
            String::from_utf8_lossy(&found.stderr)
        );
    }
}

pub(crate) struct PrivateEngine {
    label: String,
}

impl PrivateEngine {
    /// Connects to the engine. Panics with the command to run, if there is no engine or no image to test.
    pub(crate) fn connect() -> Self {
        need_images(&[GATEWAY, HOST, BUSYBOX]);
        Self { label: format!("cogni-gateway-test={}", Uuid::now_v7()) }
    }

    /// Makes a network without a route to the outside.
    pub(crate) fn internal_network(&self) -> String {
        let name = format!("cogni-{}", Uuid::now_v7());
        docker_output(&["network", "create", "--internal", "--label", &self.label, &name]);
        name
    }

    pub(crate) fn volume(&self) -> String {
        docker_output(&["volume", "create", "--label", &self.label])
    }

    /// Makes a volume with options of its driver.
    pub(crate) fn volume_of(&self, options: &[&str]) -> String {
        let options = options.iter().flat_map(|option| ["--opt", option]);
        let line: Vec<_> =
            ["volume", "create", "--label", &self.label].into_iter().chain(options).collect();
        docker_output(&line)
    }

    /// Builds an image from another image and these lines of a Dockerfile.
    pub(crate) fn image(&self, like: &str, changes: &[&str]) -> String {
        let id = docker_output(&["create", "--label", &self.label, like, "true"]);
        let changes = changes.iter().flat_map(|change| ["--change", change]);
        let commit: Vec<_> = ["commit"].into_iter().chain(changes).chain([id.as_str()]).collect();
        docker_output(&commit)
    }

    /// Runs `docker run --detach`, with `options` before the image and `command` after it.
    pub(crate) fn run(&self, image: &str, options: &[&str], command: &[&str]) -> TestContainer {
        let mut line = vec!["run", "--detach", "--label", &self.label];
        line.extend(options);
        line.push(image);
        line.extend(command);
        TestContainer { id: docker_output(&line) }
    }

    /// Returns the files of an image that are not empty; the engine itself adds only empty ones.
    pub(crate) fn files(&self, image: &str) -> Vec<String> {
        let id = docker_output(&["create", "--label", &self.label, image]);
        let listing = run_tar("--list", &["--verbose"], &run_docker(&["export", &id]).stdout);
        let files = listing.lines().filter(|line| line.starts_with('-'));
        let columns = files.map(|line| line.split_whitespace().collect::<Vec<_>>());
        columns.filter(|columns| columns[2] != "0").map(|columns| columns[5].to_owned()).collect()
    }
}

impl Drop for PrivateEngine {
    fn drop(&mut self) {
        let filter = format!("label={}", self.label);
        for (list, remove) in [
            (&["ps", "--all", "--quiet", "--filter"][..], &["rm", "--force", "--volumes"][..]),
            (&["network", "ls", "--quiet", "--filter"], &["network", "rm"]),
            (&["volume", "ls", "--quiet", "--filter"], &["volume", "rm"]),
            (&["image", "ls", "--quiet", "--filter"], &["image", "rm", "--force"]),
        ] {
            let found = run_docker(&[list, &[&filter]].concat()).stdout;
            let found = String::from_utf8_lossy(&found);
            let found: Vec<&str> = found.split_whitespace().collect();
            if !found.is_empty() {
                run_docker(&[remove, &found].concat());
            }
        }
    }
}

/// A container of an [`PrivateEngine`], which removes it.
pub(crate) struct TestContainer {
    id: String,
}

impl TestContainer {
    /// Executes a command in the container; returns its output and exit code. A command that cannot be started fails
    /// the test.
    pub(crate) fn exec(&self, command: &[&str]) -> Output {
        let output = run_docker(&[&["exec", &self.id], command].concat());
        assert!(
            !matches!(output.status.code(), Some(125..=127)),
            "`{command:?}` did not start: {output:?}; the container said: {}",
            self.logs()
        );
        output
    }

    /// Starts a command in the container and returns its output as it arrives.
    pub(crate) fn exec_live(&self, command: &[&str]) -> RunningCommand {
        let line = [&["exec", &self.id], command].concat();
        let mut child = Command::new("docker").args(line).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        RunningCommand { child, output }
    }

    /// Sends `signal` to the container's first process.
    pub(crate) fn kill(&self, signal: &str) {
        docker_output(&["kill", "--signal", signal, &self.id]);
    }

    pub(crate) fn start(&self) {
        docker_output(&["start", &self.id]);
    }

    /// Waits for the container's end, and returns its exit code.
    pub(crate) fn wait(&self) -> i32 {
        docker_output(&["wait", &self.id]).parse().unwrap()
    }

    pub(crate) fn inspect(&self, template: &str) -> String {
        docker_output(&["inspect", "--format", template, &self.id])
    }

    pub(crate) fn logs(&self) -> String {
        let output = run_docker(&["logs", &self.id]);
        [output.stdout, output.stderr].iter().map(|bytes| String::from_utf8_lossy(bytes)).collect()
    }

    /// Reads a file of the container, which need not run or have a shell.
    pub(crate) fn read(&self, path: &str) -> String {
        let archive = run_docker(&["cp", &format!("{}:{path}", self.id), "-"]);
        assert!(archive.status.success(), "{archive:?}");
        run_tar("--extract", &["--to-stdout"], &archive.stdout)
    }
}

/// A command that is still running in a container.
pub(crate) struct RunningCommand {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl RunningCommand {
    /// Waits for the next line that contains `text`.
    pub(crate) fn read_until(&mut self, text: &str) {
        let mut lines = self.output.by_ref().lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains(text)), "the output ended before `{text}`");
    }

    /// Returns the rest of the output, and the exit code.
    pub(crate) fn finish(mut self) -> (String, Option<i32>) {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        (rest, self.child.wait().unwrap().code())
    }
}

/// Returns tar's output for an archive.
fn run_tar(mode: &str, options: &[&str], archive: &[u8]) -> String {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(archive).unwrap();
    file.rewind().unwrap();
    let output = Command::new("tar").arg(mode).args(options).stdin(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn run_docker(line: &[&str]) -> Output {
    Command::new("docker")
        .args(line)
        .output()
        .expect("docker's command line is installed; `tests/run image` does it")
}

/// Returns the output of a command, which must succeed.
pub(crate) fn docker_output(line: &[&str]) -> String {
    let output = run_docker(line);
    assert!(
        output.status.success(),
        "docker {line:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
