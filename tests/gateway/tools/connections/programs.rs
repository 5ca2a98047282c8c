//! T6: Tests of the programs that print credentials: an agent's requests do not decide how many run.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use tempfile::TempDir;

use super::server::SecureServer;
use super::{code_of, start_app};

/// A program that notes its start, and prints a credential when the test lets it.
struct SlowProgram {
    directory: TempDir,
}

impl SlowProgram {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let own = Self { directory };
        let (starts, go) = (own.path("starts"), own.path("go"));
        let text = format!(
            "#!/bin/sh\necho x >> {}\nuntil [ -e {} ]; do sleep 0.05; done\necho printed-secret\n",
            starts.display(),
            go.display()
        );
        fs::write(own.path("program"), text).unwrap();
        fs::set_permissions(own.path("program"), fs::Permissions::from_mode(0o700)).unwrap();
        own
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn line(&self, argument: &str) -> String {
        let program = self.path("program");
        format!(
            "credential = {{ command = ['{}', '{argument}'] }}\nallow = ['GET /**']\n",
            program.display()
        )
    }

    fn starts(&self) -> usize {
        fs::read_to_string(self.path("starts")).unwrap_or_default().lines().count()
    }

    async fn wait_started(&self, count: usize) {
        while self.starts() < count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn let_go(&self) {
        fs::write(self.path("go"), "").unwrap();
    }
}

/// Requests over one connection at the same time share one run of the program; a later one has a run of its own.
#[tokio::test]
async fn requests_at_once_share_a_program() {
    let (server, program) = (SecureServer::start().await, SlowProgram::new());
    let app = start_app(&server.table("api", &program.line("a"))).await;
    let client = app.client();
    let asking = join_all((0..12).map(|_| client.get("/connect/api/a")));
    let watch = async {
        // All twelve have their place in the budget, and wait for the program.
        program.wait_started(1).await;
        while app.run.ledger.connection_spending()["api"].requests < 12 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        program.let_go();
    };
    let (answers, ()) = tokio::join!(asking, watch);
    assert!(answers.iter().all(|answer| answer.status == 200));
    assert!(program.starts() < 12, "{} programs have run", program.starts());
    let before = program.starts();
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    assert_eq!(program.starts(), before + 1);
    let seen = server.seen();
    assert!(seen.iter().all(|seen| seen.headers["authorization"] == "Bearer printed-secret"));
    app.stop().await;
}

/// A command line has few places, and the process has some: a request beyond them is told to come back, and costs
/// nothing.
#[tokio::test]
async fn programs_at_once_are_bounded() {
    for (arguments, places) in [(["a"; 5], 4), (["a", "b", "c", "d", "e"], 5)] {
        let (server, program) = (SecureServer::start().await, SlowProgram::new());
        let tables = arguments
            .iter()
            .enumerate()
            .map(|(number, argument)| server.table(&format!("c{number}"), &program.line(argument)));
        let app = start_app(&tables.collect::<String>()).await;
        let client = app.client();
        let paths: Vec<_> = (0..5).map(|number| format!("/connect/c{number}/a")).collect();
        let asking = join_all(paths[..4].iter().map(|path| client.get(path)));
        let watch = async {
            program.wait_started(4).await;
            let last = tokio::join!(client.get(&paths[4]), async {
                if places == 5 {
                    program.wait_started(5).await;
                    program.let_go();
                }
            });
            program.let_go();
            last.0
        };
        let (answers, last) = tokio::join!(asking, watch);
        assert!(answers.iter().all(|answer| answer.status == 200));
        if places == 5 {
            assert_eq!(last.status, 200);
        } else {
            assert_eq!(code_of(&last), "429 overloaded");
            assert_eq!(last.header("retry-after"), Some("1"));
            assert!(last.header("x-should-retry").is_none());
            assert_eq!(app.run.ledger.connection_spending()["c4"].requests, 0);
        }
        assert_eq!(program.starts(), places);
        app.stop().await;
    }
}
