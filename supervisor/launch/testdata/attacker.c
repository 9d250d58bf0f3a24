/* What a process in a container can do to one that is let in beside it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t next(void)
{
	pid_t last = fork();
	if (last == 0)
		_exit(0);
	waitpid(last, NULL, 0);
	return last + 1;
}

/* sends a signal to the process that comes next */
static void shoot(int signal)
{
	for (;;) {
		pid_t pid = next();
		for (int i = 0; i < 20000; i++)
			kill(pid, signal);
	}
}

static void look(const char *proc, const char *name)
{
	char path[300], target[300];
	snprintf(path, sizeof path, "%s/%s", proc, name);
	ssize_t n = readlink(path, target, sizeof target - 1);
	if (n > 0) {
		target[n] = 0;
		printf("%s %s\n", name, target);
	}
}

/* says what it sees of the process that comes next */
static void spy(void)
{
	for (;;) {
		char proc[100], path[400], line[400];
		pid_t pid = next();
		for (int i = 0; i < 20000; i++) {
			snprintf(proc, sizeof proc, "/proc/%d", pid);
			snprintf(path, sizeof path, "%s/root", proc);
			int root = open(path, O_PATH | O_DIRECTORY);
			if (root < 0)
				continue;
			printf("root %s\n", faccessat(root, "pause", F_OK, 0) ? "of the node" : "of the container");
			close(root);
			look(proc, "exe");
			look(proc, "cwd");
			snprintf(path, sizeof path, "%s/fd", proc);
			DIR *fds = opendir(path);
			for (struct dirent *e; fds && (e = readdir(fds));) {
				snprintf(path, sizeof path, "fd/%s", e->d_name);
				look(proc, path);
			}
			if (fds)
				closedir(fds);
			for (const char *const *name = (const char *const[]){ "mountinfo", "net/unix", NULL }; *name; name++) {
				snprintf(path, sizeof path, "%s/%s", proc, *name);
				FILE *file = fopen(path, "r");
				while (file && fgets(line, sizeof line, file))
					printf("%s %s", *name, line);
				if (file)
					fclose(file);
			}
			fflush(stdout);
		}
	}
}

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	if (!strcmp(argv[1], "stop"))
		shoot(SIGSTOP);
	if (!strcmp(argv[1], "kill"))
		shoot(SIGKILL);
	if (!strcmp(argv[1], "spy"))
		spy();
	if (!strcmp(argv[1], "lease")) {
		signal(SIGIO, SIG_IGN);
		int file = open(argv[2], O_RDWR);
		if (fcntl(file, F_SETLEASE, F_WRLCK))
			return 3;
		puts("leased");
		fflush(stdout);
		for (;;)
			pause();
	}
	return atoi(argv[1]);
}
